"""The Triton backward as a family, for every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import Language
from flexattn.kernels.base.family import Around, Effort, KernelFamily
from flexattn.kernels.base.knobs import turned, words
from flexattn.kernels.base.source import Source
from flexattn.kernels.base.tiles import Geometry
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.kernels.triton_backward.defaults import axes, defaults
from flexattn.kernels.triton_backward.limits import LIMITS
from flexattn.kernels.triton_backward.source import render, render_delta, rows_of_delta
from flexattn.kernels.triton_backward.tiles import (
    backward_grid,
    fit_to_mask,
    sizes_of_launch,
    skips_blocks,
)
from flexattn.problem import Kind, Problem, Structure


class _Backward(KernelFamily[BackwardConfig]):
    name = "triton_backward"
    kind: Kind = "backward"
    language: Language = "triton"
    limits = LIMITS

    def defaults(self, problem: Problem, device: Device) -> Iterator[BackwardConfig]:
        return (fit_to_mask(each, problem.structure) for each in defaults(problem, device))

    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[BackwardConfig]:
        every = axes(problem, device, effort == "exhaustive")
        for each in every:
            yield from turned(fit_to_mask(each, problem.structure), problem.structure)

    def fit_to_mask(self, config: BackwardConfig, structure: Structure) -> BackwardConfig:
        return fit_to_mask(config, structure)

    def options_of(self, config: BackwardConfig) -> dict[str, int | bool | str]:
        names = (*dict(config.tiles), "num_warps", "num_stages")
        return {f"bwd_{name}": getattr(config, name) for name in names}

    def grid(self, problem: Problem, config: BackwardConfig, device: Device) -> Geometry:
        return backward_grid(problem, config)

    def render(
        self, structure: Structure, config: BackwardConfig, device: Device, title: str
    ) -> Source:
        return render(structure, config, device, title)

    def bind(self, problem: Problem, config: BackwardConfig, grid: Geometry) -> dict[str, Any]:
        return sizes_of_launch(problem, config)

    def around(self, problem: Problem, config: BackwardConfig, device: Device) -> Around:
        structure = problem.structure
        before, through_lse = (render_delta(structure, device, each) for each in (False, True))
        tiles = -(-problem.q_len // rows_of_delta(structure))
        blocks = skips_blocks(structure, config)
        return Around((before, through_lse), problem.B * problem.Hq * tiles, blocks=blocks)

    def launch_key(self, config: BackwardConfig) -> tuple[object, ...]:
        return *config.tiles, config.num_warps

    def short(self, config: BackwardConfig) -> str:
        """64x128 128x64 w8 s2: of each half, the rows and the keys."""
        c = config
        tiles = f"{c.BLOCK_M1}x{c.BLOCK_N1} {c.BLOCK_M2}x{c.BLOCK_N2}"
        tma = ["tma"] * c.use_tma
        return " ".join([f"{tiles} w{c.num_warps} s{c.num_stages}", *tma, *words(config)])


BACKWARD = _Backward()
