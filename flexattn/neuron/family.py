"""The NKI family: the configs of a problem's space on a target, and why others cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from flexattn.device.neuroncore import (
    CORES,
    PARTITIONS,
    PSUM_BANKS,
    STATIONARY_MAX,
    NeuronCore,
)
from flexattn.errors import UnsupportedError
from flexattn.kernels.base.limits import Limits, Rule, able
from flexattn.kernels.choose.defaults import Survey
from flexattn.neuron.config import (
    CHUNK,
    MaskSelect,
    NkiConfig,
    NkiDecodeConfig,
    NkiPrefillConfig,
    NkiShape,
    memory_of,
    shape_of,
)
from flexattn.neuron.source import NkiMods, print_mods
from flexattn.problem import Problem


@dataclass(eq=False)
class NkiCase:
    """A config for a problem on a core. mods: as printed, or why they cannot be expressed."""

    config: NkiConfig
    problem: Problem
    core: NeuronCore
    mods: NkiMods | str = ""

    @cached_property
    def shape(self) -> NkiShape:
        """The numbers of the template."""
        return shape_of(self.problem, self.config)

    @cached_property
    def memory(self) -> tuple[int, int]:
        """Bytes of a partition of SBUF, and banks of PSUM."""
        tiles = self.mods.tiles if isinstance(self.mods, NkiMods) else {}
        return memory_of(self.problem, self.config, tiles, self.shape)

    @property
    def selects_ranges(self) -> bool:
        """True if the mask uses range_select."""
        mask = self.mods.mask if isinstance(self.mods, NkiMods) else None
        return mask is not None and mask.reduces


def _at_least_one(name: str) -> Rule[NkiCase]:
    words = f"{name}={{c.config.{name}}} is below 1"
    return Rule("at least one", words, lambda c: bool(getattr(c.config, name) >= 1))


NKI_LIMITS: Limits[NkiCase] = Limits(
    NkiCase,
    shape=(
        *map(
            _at_least_one,
            (
                "BLOCK_M",
                "BLOCK_N",
                "num_splits",
                "section",
                "score_buffers",
                "value_buffers",
                "buffers",
                "kv_buffers",
            ),
        ),
        Rule(
            "rows",
            f"BLOCK_M={{c.config.BLOCK_M}}: a matmul has {STATIONARY_MAX} stationary columns",
            lambda c: c.config.BLOCK_M <= STATIONARY_MAX,
        ),
        Rule(
            "keys",
            f"BLOCK_N={{c.config.BLOCK_N}} is less than a chunk of {PARTITIONS} keys",
            lambda c: c.config.BLOCK_N >= PARTITIONS,
        ),
    ),
    fit=(
        Rule("mods", "{c.mods}", lambda c: isinstance(c.mods, NkiMods)),
        Rule(
            "sbuf",
            "SBUF: {c.memory[0]} bytes of a partition, {c.core.name} has {c.core.sbuf_bytes}",
            lambda c: c.memory[0] <= c.core.sbuf_bytes,
        ),
        Rule(
            "psum",
            f"PSUM: {{c.memory[1]}} banks, there are {PSUM_BANKS}",
            lambda c: c.memory[1] <= PSUM_BANKS,
        ),
        Rule(
            "range_select",
            "mask=range: {c.core.name} has no range_select",
            lambda c: not c.selects_ranges or c.core.has_range_select,
        ),
    ),
)


NkiEffort = Literal["quick", "full"]
FORMS: tuple[MaskSelect, ...] = ("range", "affine", "select")


class _Nki:
    name = "nki"
    kind = "nki"

    def short(self, config: NkiConfig) -> str:
        """128x512 k4096 is tiles of 512 keys, of 4096 that stay on the chip."""
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} k{config.section}"]
        parts += [f"x{config.num_splits}"] * (config.num_splits > 1)
        parts += [config.mask] * (config.mask != "range")
        return " ".join(parts)


NKI = _Nki()


class _Cases:
    """The cases of a problem's configs on a target; its mods are printed once a form of masks."""

    def __init__(self, problem: Problem, target: str) -> None:
        self._problem, self._target = problem, target
        self._found: dict[MaskSelect, NkiMods | str] = {}

    def of(self, config: NkiConfig) -> NkiCase:
        """A config's."""
        return NkiCase(config, self._problem, CORES[self._target], self.mods(config.mask))

    def mods(self, mask: MaskSelect) -> NkiMods | str:
        """The mods with masks applied in this way, or why they cannot be expressed."""
        if mask not in self._found:
            config = _plain(self._problem, mask)
            try:
                self._found[mask] = print_mods(self._problem, config, self._target)
            except UnsupportedError as error:
                self._found[mask] = str(error)
        return self._found[mask]


def _plain(problem: Problem, mask: MaskSelect) -> NkiConfig:
    of_kind = NkiDecodeConfig if problem.structure.kind == "decode" else NkiPrefillConfig
    return of_kind(128, 128, mask=mask)


def broken_rules(config: NkiConfig, problem: Problem, target: str) -> list[Rule[NkiCase]]:
    """The rules that a config breaks on a target such as "trn2".

    Where the config's own numbers mean nothing, the rules of what it takes are not asked.
    """
    return NKI_LIMITS.broken(_Cases(problem, target).of(config))


def target_reasons(config: NkiConfig, problem: Problem, target: str) -> list[str]:
    """Why a config cannot run for a problem on a target; an empty list when it can."""
    return NKI_LIMITS.said(_Cases(problem, target).of(config))


def default_config(problem: Problem, target: str) -> NkiConfig:
    """The config to start from: the first of a few that fits; raises as `target_survey` does."""
    return _first(problem, target, _Cases(problem, target))


def _first(problem: Problem, target: str, cases: _Cases) -> NkiConfig:
    if all(isinstance(cases.mods(form), str) for form in FORMS):
        # One error about a mod, instead of the same reason against every config.
        print_mods(problem, _plain(problem, FORMS[-1]), target)
    forms = _forms(problem)
    found = able(
        (replace(config, mask=form) for config in _preferences(problem) for form in forms),
        lambda config: NKI_LIMITS.said(cases.of(config)),
        f"no config of the NKI {problem.structure.kind} template fits {problem.describe()}",
        "use smaller head dimensions, or a shorter mod",
    )
    return next(found)


def target_survey(problem: Problem, target: str, effort: NkiEffort = "full") -> Survey:
    """The configs of an effort that fit, each once, and the others counted by reason.

    Raises UnsupportedError naming the operation and the target for mods that cannot be expressed,
    ConfigError with the reasons where no config fits.
    """
    cases = _Cases(problem, target)
    first = _first(problem, target, cases)
    offered, rejected = [first], Counter[str]()
    for config in dict.fromkeys(_grid(problem, effort)):
        if config == first:
            continue
        broken = NKI_LIMITS.broken(cases.of(config))
        if broken:
            rejected[broken[0].name] += 1
        else:
            offered.append(config)
    return Survey(tuple(offered), tuple(rejected.items()))  # type: ignore[arg-type]


def _preferences(problem: Problem) -> Iterator[NkiConfig]:
    most = 2 * max(problem.kv_len, CHUNK)
    widths = tuple(each for each in ((512, 2), (256, 2), (128, 2), (128, 1)) if each[0] < most)
    for (width, score_buffers), section in product(widths, (4096, 1024, 256, 128)):
        for buffers in (2, 1):
            if problem.structure.kind == "prefill":
                yield NkiPrefillConfig(128, width, section, score_buffers, buffers=buffers)
            else:
                yield NkiDecodeConfig(
                    128, width, 1, section, score_buffers, buffers=buffers, kv_buffers=buffers
                )
    if problem.structure.kind == "prefill":
        yield NkiPrefillConfig(32, 128, 128, 1, buffers=1)


def _grid(problem: Problem, effort: NkiEffort) -> Iterator[NkiConfig]:
    full, prefill = effort == "full", problem.structure.kind == "prefill"
    # Beyond the keys that there are, a wider tile or section is the same one.
    most = 2 * max(problem.kv_len, CHUNK)
    widths = tuple(width for width in (128, 256, 512, 1024, 2048) if width < most)
    depths = (1024, 4096, 8192) if full else (4096,)
    sections = tuple(depth for depth in depths if depth < most) or depths[:1]
    heights, counts = (64, 128) if full else (128,), (1, 2) if full else (1,)
    axes = (heights, widths, sections, (1, 2), counts, _forms(problem))
    for rows, width, section, scores, value, mask in product(*axes):
        chosen: dict[str, Any] = {
            "section": section, "score_buffers": scores, "value_buffers": value, "mask": mask,
        }  # fmt: skip
        if prefill:
            ahead = full and problem.kv_len > section
            for buffers in (1, 2)[: 1 + ahead]:
                yield NkiPrefillConfig(rows, width, kv_buffers=buffers, **chosen)
            continue
        for splits in (1, 2, 4, 8) if full else (1, 2):
            if splits * CHUNK <= max(problem.kv_len, CHUNK):
                yield NkiDecodeConfig(rows, width, splits, **chosen)


def _forms(problem: Problem) -> tuple[MaskSelect, ...]:
    return FORMS if problem.structure.mask is not None else FORMS[:1]
