"""Blackwell's prefill as a family: chosen by BACKEND="GLUON" alone until somebody measures it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, Language
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.ragged import packed_heads, packs
from flexattn.kernels.base.source import Source
from flexattn.kernels.blackwell.config import (
    LANES,
    BlackwellPrefillConfig,
    fit_to_mask,
)
from flexattn.kernels.blackwell.limits import LIMITS
from flexattn.kernels.blackwell.source import render
from flexattn.problem import Kind, Problem, Structure
from flexattn.problem.serving import ServingProblem


class _Prefill(KernelFamily[BlackwellPrefillConfig]):
    name = "blackwell"
    kind: Kind = "prefill"
    language: Language = "gluon"
    limits = LIMITS

    def offered(self, device: Device) -> bool:
        return device.has_tensor_memory and _has_tensor_memory()

    def defaults(self, problem: Problem, device: Device) -> Iterator[BlackwellPrefillConfig]:
        structure = problem.structure
        keys = 128 if max(structure.head_dims) <= 128 else 64
        for q_tiles in (2, 1):
            heads = 1
            if isinstance(problem, ServingProblem) and packs(problem.structure):
                rows = problem.rows // problem.B
                heads = packed_heads(rows, problem.structure.group, LANES * q_tiles)
            for stages in (4, 3, 2):
                config = BlackwellPrefillConfig(keys, stages, q_tiles, 4, heads)
                yield fit_to_mask(config, structure)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[BlackwellPrefillConfig]:
        return iter(())

    def fit_to_mask(
        self, config: BlackwellPrefillConfig, structure: Structure
    ) -> BlackwellPrefillConfig:
        return fit_to_mask(config, structure)

    def check_rows(self, rows: int) -> None:
        if rows not in (LANES, 2 * LANES, 4 * LANES):
            raise ConfigError(
                f"kernel_options['BLOCK_M']={rows} with the Gluon template for Blackwell",
                f"its tiles have {LANES} rows, or {2 * LANES} of two CTAs; a program has 1 or 2",
                f"use {LANES} or {2 * LANES}, with NUM_CTAS=2 {2 * LANES} or {4 * LANES}",
            )

    def forced(
        self, config: BlackwellPrefillConfig, numbers: Mapping[str, Any]
    ) -> BlackwellPrefillConfig:
        """Rows are a number of tiles; its warps and its loads are no choice.

        A CTA of two has half of each tile of keys, and so twice the stages.
        """
        ctas = numbers.get("num_ctas", config.num_ctas)
        stages = config.num_stages * ctas // config.num_ctas
        config = replace(
            config, BLOCK_N=numbers.get("BLOCK_N", config.BLOCK_N),
            num_stages=numbers.get("num_stages", stages), num_ctas=ctas,
        )  # fmt: skip
        return replace(config, q_tiles=numbers.get("BLOCK_M", config.BLOCK_M) // (LANES * ctas))

    def options_of(self, config: BlackwellPrefillConfig) -> dict[str, int | bool | str]:
        numbers = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
        if config.num_ctas > 1:
            numbers["NUM_CTAS"] = config.num_ctas
        return {"BACKEND": "GLUON", **numbers, "num_stages": config.num_stages}

    def grid(self, problem: Problem, config: BlackwellPrefillConfig, device: Device) -> Geometry:
        # A program for each work tile: q_tiles tiles of rows of one head, or of several.
        if isinstance(problem, ServingProblem):
            # Each request may end within a tile.
            tiles = problem.rows // config.BLOCK_M + problem.B
            units = tiles * problem.Hkv * config.head_tiles(problem.structure.group)
            return Geometry(units, tiles, units)
        tiles = -(-problem.q_len // config.BLOCK_M)
        units = problem.B * problem.Hq * tiles
        return Geometry(units, tiles, units)

    def render(
        self, structure: Structure, config: BlackwellPrefillConfig, device: Device, title: str
    ) -> Source:
        return render(structure, config, device, title)


def _has_tensor_memory() -> bool:
    """True if the installed Triton's Gluon has tensor memory with the names of 3.9."""
    try:
        from triton.experimental.gluon.language.nvidia import blackwell
    except ImportError:
        return False
    return hasattr(blackwell.tensor_memory_descriptor, "reinterpret")


PREFILL = _Prefill()
