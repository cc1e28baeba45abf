"""The Triton templates as families: prefill and decode, for every GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.amd import each_hinted, hint_words
from flexattn.kernels.base.config import Geometry, Language, at_rest, words
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.limits import Limits
from flexattn.kernels.base.source import UNFUSED, Source, hinted, with_hints
from flexattn.kernels.triton.config import (
    AmdDecodeConfig,
    AmdPrefillConfig,
    DecodeConfig,
    PrefillConfig,
    TritonConfigT,
    decode_grid,
    fit_to_mask,
    prefill_grid,
)
from flexattn.kernels.triton.defaults import (
    beats_hopper,
    best_splits,
    decode_axes,
    decode_rules,
    invariant_config,
    of_short_prompt,
    other_tiles,
    prefill_axes,
    prefill_rules,
    was_raced,
)
from flexattn.kernels.triton.limits import LIMITS, ConfigCase
from flexattn.kernels.triton.source import render, render_combine
from flexattn.problem import Kind, Problem, Structure
from flexattn.settings import log


class _Family(KernelFamily[TritonConfigT]):
    """The common parts of prefill and decode."""

    name = "triton"
    language: Language = "triton"
    limits: Limits[ConfigCase] = LIMITS

    def _put_first(
        self,
        rules: Iterable[TritonConfigT],
        by_sizes: Callable[[TritonConfigT], TritonConfigT | None],
        problem: Problem,
        device: Device,
    ) -> Iterator[TritonConfigT]:
        """The rules' configs; on Hopper, before them, what sizes make of the first able one."""
        kept, can_run = list(rules), self.can_run(problem, device)
        first = next(filter(can_run, kept), None) if device.has_wgmma else None
        best = None if first is None else by_sizes(first)
        if best is not None and best != first and can_run(best):
            yield best
        yield from (each for each in kept if each != best or best == first)

    fit_to_mask = staticmethod(fit_to_mask)

    def render(
        self, structure: Structure, config: TritonConfigT, device: Device, title: str
    ) -> Source:
        source = with_hints(render(structure, config, device, title), config, structure)
        return hinted(source, UNFUSED) if structure.batch_invariant else source

    def _short(self, config: TritonConfigT, own: list[str]) -> str:
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
        return " ".join(parts + own + hint_words(config) + words(config))


class _Prefill(_Family[PrefillConfig]):
    kind: Kind = "prefill"

    def defaults(self, problem: Problem, device: Device) -> Iterator[PrefillConfig]:
        def by_sizes(first: PrefillConfig) -> PrefillConfig | None:
            return of_short_prompt(problem, first, device)

        return self._put_first(prefill_rules(problem, device), by_sizes, problem, device)

    def goes_first(self, problem: Problem, device: Device) -> bool:
        return beats_hopper(problem, device)

    def at_other_sizes(self, problem: Problem, device: Device) -> Iterator[PrefillConfig]:
        """The configs that may come before Hopper's template, or first where that is not there."""
        if device.has_wgmma and was_raced(problem.structure):
            able = filter(self.can_run(problem, device), prefill_rules(problem, device))
            for first in islice(able, 1):
                yield first
                yield from other_tiles(first)

    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[PrefillConfig]:
        every = effort == "exhaustive"
        found = prefill_axes(problem, device, every)
        return each_hinted(found, AmdPrefillConfig, device, every)

    invariant = staticmethod(invariant_config)

    def tile(self, config: PrefillConfig) -> PrefillConfig:
        return replace(at_rest(config), order="last")

    def without_hints(
        self, config: PrefillConfig, structure: Structure, device: Device
    ) -> PrefillConfig:
        """The copy engine, as for torch, is a hint."""
        found = LIMITS.violated(config, structure, device) if config.use_tma else []
        if all(rule.name != "tma" for rule in found):
            return config
        plain = replace(config, use_tma=False)
        kept = set(LIMITS.reasons(plain, structure, device))
        lost = set(LIMITS.reasons(config, structure, device)) - kept
        log.debug("kernel_options['USE_TMA'] has no effect: %s", "; ".join(sorted(lost)))
        return plain

    def options_of(self, config: PrefillConfig) -> dict[str, int | bool | str]:
        return {**super().options_of(config), "USE_TMA": config.use_tma}

    def grid(self, problem: Problem, config: PrefillConfig, device: Device) -> Geometry:
        return prefill_grid(problem, config)

    def short(self, config: PrefillConfig) -> str:
        """128x64 w4 s2 tma group."""
        own = ["tma"] * config.use_tma + [config.order] * (config.order != "last")
        return self._short(config, own)


class _Decode(_Family[DecodeConfig]):
    kind: Kind = "decode"

    def defaults(self, problem: Problem, device: Device) -> Iterator[DecodeConfig]:
        """Before the rules' configs another number of splits: kernels do not depend on it."""

        def by_sizes(first: DecodeConfig) -> DecodeConfig:
            return replace(first, num_splits=best_splits(problem, first, device))

        return self._put_first(decode_rules(problem, device), by_sizes, problem, device)

    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[DecodeConfig]:
        every, height = effort == "exhaustive", next(self.able(problem, device)).BLOCK_M
        found = decode_axes(problem, device, every, height)
        return each_hinted(found, AmdDecodeConfig, device, every)

    def tile(self, config: DecodeConfig) -> DecodeConfig:
        return replace(at_rest(config), num_splits=0)

    def as_rendered(self, config: DecodeConfig) -> DecodeConfig:
        return replace(config, num_splits=0)

    def options_of(self, config: DecodeConfig) -> dict[str, int | bool | str]:
        splits = {"SPLIT_KV": config.num_splits}
        return super().options_of(config) | (splits if config.num_splits else {})

    grid = staticmethod(decode_grid)

    def at_sizes(
        self, config: DecodeConfig, measured: Problem, problem: Problem, device: Device
    ) -> DecodeConfig:
        """A fixed number of splits was right for a number of programs: that number is kept."""
        if not config.num_splits:
            return config
        programs = decode_grid(measured, config, device).programs
        single = decode_grid(problem, replace(config, num_splits=1), device).programs
        # Nothing is launched where there is no row.
        return replace(config, num_splits=max(1, round(programs / max(1, single))))

    combine = staticmethod(render_combine)

    def bind(self, problem: Problem, config: DecodeConfig, grid: Geometry) -> dict[str, Any]:
        rows = problem.B * problem.Hq * problem.q_len
        # Without splits the kernel never touches its workspace.
        unused = {} if grid.num_splits > 1 else {"WORKSPACE": 0}
        return {"num_splits": grid.num_splits, "num_rows": rows, **unused}

    def launch_key(self, config: DecodeConfig) -> tuple[object, ...]:
        return config.BLOCK_M, config.num_warps, config.num_splits

    def short(self, config: DecodeConfig) -> str:
        """16x128 w4 s3 x8 for eight splits."""
        return self._short(config, [f"x{config.num_splits}"] * (config.num_splits > 0))


PREFILL, DECODE = _Prefill(), _Decode()
