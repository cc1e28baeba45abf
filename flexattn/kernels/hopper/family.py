"""Hopper's prefill as a family: a warp-specialised template in Gluon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, Language, at_rest, words
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.features import FEW_BY_KEY, values_by_key
from flexattn.kernels.base.source import Source
from flexattn.kernels.hopper import ragged, space
from flexattn.kernels.hopper.config import (
    CONSUMER_REGISTERS,
    CONSUMER_ROWS,
    WIDEST,
    HopperPrefillConfig,
    fit_to_mask,
    grid,
    with_consumers,
)
from flexattn.kernels.hopper.limits import LIMITS
from flexattn.kernels.hopper.source import render, render_transposed_values, render_wide_values
from flexattn.kernels.hopper.space import alternatives, sized
from flexattn.kernels.ptx.assembler import offered, preferred
from flexattn.problem import Kind, Problem, Structure
from flexattn.problem.serving import ServingProblem

# The one switch: whether it serves prefills on Hopper that nobody tuned. Either way another family
# serves what this one cannot, and a tuner chooses between both.
LEADS = True
# Head dimensions above 256 that it serves by default: others were not raced, and are left to a
# search.
WIDE_DEFAULTS = ((512, 512),)
# Rows of the tiles with which they were raced, of two consumers.
_RACED_ROWS = 2 * CONSUMER_ROWS


def _raced(structure: Structure) -> bool:
    """True if heads above 256 columns are served as they were raced, with whole tiles of rows."""
    dims, sparsity = (structure.head_dim_qk, structure.head_dim_v), structure.sparsity
    whole = sparsity is None or sparsity.runs or sparsity.q_block % _RACED_ROWS == 0
    return dims in WIDE_DEFAULTS and whole


class _Prefill(KernelFamily[HopperPrefillConfig]):
    name = "hopper"
    kind: Kind = "prefill"
    language: Language = "gluon"
    limits = LIMITS

    def offered(self, device: Device) -> bool:
        return device.has_wgmma and offered()

    def leads(self, structure: Structure, device: Device) -> bool:
        if structure.fp8:
            return True
        if structure.kv_dtype or structure.dtype == "float32":
            return False
        if structure.head_dim_qk > WIDEST and not _raced(structure):
            return False
        return LEADS and self.offered(device) and values_by_key(structure) <= FEW_BY_KEY

    def defaults(self, problem: Problem, device: Device) -> Iterator[HopperPrefillConfig]:
        if isinstance(problem, ServingProblem):
            return ragged.ragged_defaults(problem, device)
        return sized(problem, device)

    def at_other_sizes(self, problem: Problem, device: Device) -> Iterator[HopperPrefillConfig]:
        structure = problem.structure
        every = space.preferences(structure)
        rules = [each for each in every if not self.limits.violated(each, structure, device)]
        yield from rules[:1]
        yield from alternatives(replace(problem, q_len=1), rules)

    variants = staticmethod(space.forms)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[HopperPrefillConfig]:
        return space.axes(problem, effort == "exhaustive")

    def tile(self, config: HopperPrefillConfig) -> HopperPrefillConfig:
        """Without what a search turns on the same tiles; at_rest resets its knobs."""
        return replace(
            at_rest(config),
            ping_pong=False,
            tile_scheduler="grid",
            l2_swizzle=8,
            lazy_rescale=False,
            order="last",
        )

    def uncompiled(self, config: HopperPrefillConfig) -> HopperPrefillConfig:
        return replace(config, merge_consumers=True, ptxas="")

    def of_this_compiler(self, config: HopperPrefillConfig) -> HopperPrefillConfig:
        """The other Triton brought other assemblers."""
        return replace(config, ptxas=preferred())

    fit_to_mask = staticmethod(fit_to_mask)

    def check_rows(self, rows: int) -> None:
        if rows < CONSUMER_ROWS or rows % CONSUMER_ROWS:
            raise ConfigError(
                f"kernel_options['BLOCK_M']={rows} with the Gluon template",
                f"each of its consumers has {CONSUMER_ROWS} rows",
                f"use {CONSUMER_ROWS}, {2 * CONSUMER_ROWS} or {3 * CONSUMER_ROWS}",
            )

    def forced(
        self, config: HopperPrefillConfig, numbers: Mapping[str, Any]
    ) -> HopperPrefillConfig:
        """Rows are a number of consumers; its warps and its loads are no choice."""
        names = ("BLOCK_N", "num_stages", "merge_consumers", "ptxas")
        config = replace(config, **{name: numbers[name] for name in names if name in numbers})
        return with_consumers(config, numbers.get("BLOCK_M", config.all_rows) // CONSUMER_ROWS)

    def options_of(self, config: HopperPrefillConfig) -> dict[str, int | bool | str]:
        rows, keys, stages = config.all_rows, config.BLOCK_N, config.num_stages
        return {"BACKEND": "GLUON", "BLOCK_M": rows, "BLOCK_N": keys, "num_stages": stages}

    grid = staticmethod(grid)
    render = staticmethod(render)

    def values_kernel(self, structure: Structure, device: Device) -> Source | None:
        """The kernel that makes V of fp8 16 bits, or transposes it where it stays in 8."""
        if not structure.fp8:
            return None
        made = render_transposed_values if structure.e4m3_weights else render_wide_values
        return made(structure.head_dim_v, device)

    def bind(
        self, problem: Problem, config: HopperPrefillConfig, grid: Geometry
    ) -> dict[str, Any]:
        return {"num_work_tiles": grid.num_work_tiles}

    def short(self, config: HopperPrefillConfig) -> str:
        """128x128 c2 s2 pingpong static heads has two consumers that alternate.

        r, q, v: consumer_regs, q_in_regs and v_box, where they are no default; parts: v_parts and
        k_parts. h: packed_heads. lazy: lazy_rescale; gqa: pack_gqa; drains: no
        cross_tile_pipeline; pingpong-softmax: ping_pong with ping_pong_softmax; then
        tile_scheduler and order.
        """
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} c{config.consumers} s{config.num_stages}"]
        if config.consumer_regs != CONSUMER_REGISTERS.get(config.consumers):
            parts.append(f"r{config.consumer_regs}")
        numbers = {"q": config.q_in_regs, "v": config.v_box}
        parts += [f"{letter}{number}" for letter, number in numbers.items() if number]
        if config.v_parts * config.k_parts > 1:
            parts.append(f"parts{config.v_parts}-{config.k_parts}")
        parts += [f"h{config.packed_heads}"] * (config.packed_heads > 1)
        parts += ["splits"] * config.splits
        flags = {"lazy": config.lazy_rescale, "gqa": config.pack_gqa}
        parts += [word for word, holds in flags.items() if holds]
        parts += ["drains"] * (not config.cross_tile_pipeline)
        if config.ping_pong:
            parts.append("pingpong" + "-softmax" * config.ping_pong_softmax)
        parts += [config.tile_scheduler] * (config.tile_scheduler != "grid")
        if config.order != "last":
            parts.append(config.order + str(config.l2_swizzle) * (config.order == "sections"))
        return " ".join(parts + words(config))


PREFILL = _Prefill()
