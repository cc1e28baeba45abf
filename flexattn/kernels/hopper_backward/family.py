"""Hopper's backward as a family: a warp-specialised template in Gluon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.arguments import skips_vanished
from flexattn.kernels.base.config import Geometry, Language, words
from flexattn.kernels.base.family import Around, Effort, KernelFamily
from flexattn.kernels.base.source import Source
from flexattn.kernels.hopper_backward import space
from flexattn.kernels.hopper_backward.arguments import SUMS_OF_A_ROW, flags_of
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, columns
from flexattn.kernels.hopper_backward.limits import LIMITS
from flexattn.kernels.hopper_backward.source import (
    render,
    render_after,
    render_before,
    render_trim,
)
from flexattn.kernels.hopper_backward.tiles import (
    at_sizes,
    backward_grid,
    sizes_of_launch,
    trims_runs,
)
from flexattn.problem import Kind, Problem, Structure

_API = "experimental/gluon/language/nvidia/hopper"


class _Backward(KernelFamily[HopperBackwardConfig]):
    name = "hopper_backward"
    kind: Kind = "backward"
    language: Language = "gluon"
    limits = LIMITS

    def offered(self, device: Device) -> bool:
        found = find_spec("triton")
        places = () if found is None else found.submodule_search_locations or ()
        return device.has_wgmma and any((Path(each) / _API).is_dir() for each in places)

    def leads(self, structure: Structure, device: Device) -> bool:
        """Where tiles are not much wider than heads: of 72 to 88 columns 128 are multiplied."""
        return self.offered(device) and not 64 < _widest(structure) < 96

    def defaults(self, problem: Problem, device: Device) -> Iterator[HopperBackwardConfig]:
        return space.defaults(problem)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[HopperBackwardConfig]:
        return space.axes(problem, effort == "exhaustive")

    def options_of(self, config: HopperBackwardConfig) -> dict[str, int | bool | str]:
        return {"BACKEND": "GLUON"}

    def at_sizes(
        self,
        config: HopperBackwardConfig,
        measured: Problem,
        problem: Problem,
        device: Device,
    ) -> HopperBackwardConfig:
        return at_sizes(config, problem)

    def grid(self, problem: Problem, config: HopperBackwardConfig, device: Device) -> Geometry:
        return backward_grid(problem, config, device)

    def render(
        self, structure: Structure, config: HopperBackwardConfig, device: Device, title: str
    ) -> Source:
        return render(structure, config, device, title)

    def around(self, problem: Problem, config: HopperBackwardConfig, device: Device) -> Around:
        """dq is added up in fp32, in the order in which threads hold it."""
        structure = problem.structure
        tiles = problem.B * problem.Hq * sizes_of_launch(problem, config)["num_queries"]
        rows = config.BLOCK_M * columns(structure) // SUMS_OF_A_ROW
        scratch = [
            ("STATS", (1, 1, tiles, 2 * config.BLOCK_M)),
            ("DQ_ACC", (1, tiles, rows, SUMS_OF_A_ROW)),
        ]
        if config.dq_tma:
            scratch.append((flags_of(config), (1, 1, tiles, 1 + config.dq_halves)))
        if config.persistent:
            scratch.append(("WORK_COUNTER", (1, 1, 1, 4)))
        before, through_lse = (
            render_before(structure, config, device, each) for each in (False, True)
        )
        after = render_after(structure, config, device)
        skips = skips_vanished(structure, config)
        blocks = (config.BLOCK_M, config.BLOCK_N) if skips else None
        trim = render_trim(structure, config, device) if trims_runs(structure, config) else None
        return Around((before, through_lse), tiles, after, tuple(scratch), blocks, trim)

    def bind(
        self, problem: Problem, config: HopperBackwardConfig, grid: Geometry
    ) -> dict[str, Any]:
        return sizes_of_launch(problem, config)

    def made_deterministic(
        self, config: HopperBackwardConfig, structure: Structure
    ) -> HopperBackwardConfig | None:
        """At up to 128 columns: shared memory has no room for a tile of dQ of 256."""
        if columns(structure) > 128:
            return None
        stages = min(config.num_stages, 3)
        return replace(
            config,
            BLOCK_M=64,
            num_stages=stages,
            dq_halves=False,
            ds_first=False,
            dq_tma=True,
            deterministic=True,
            waves=1,
            persistent=False,
            dp_rs=False,
            trimmed=False,
            remat=True,
            by_product=False,
        )

    def launch_key(self, config: HopperBackwardConfig) -> tuple[object, ...]:
        return config.BLOCK_M, config.BLOCK_N, config.waves, config.deterministic

    def short(self, config: HopperBackwardConfig) -> str:
        """64x128 s2, then the form that sizes allow, and the words of what is turned."""
        form = ["mha"] * config.mha + ["even"] * config.even_n
        tile = f"{config.BLOCK_M}x{config.BLOCK_N} s{config.num_stages}"
        ahead = [f"pipelined-{config.pipelined}"] if config.pipelined else []
        return " ".join([tile, *form, *ahead, *words(replace(config, pipelined=""))])


def _widest(structure: Structure) -> int:
    return max(structure.head_dim_qk, structure.head_dim_v)


BACKWARD = _Backward()
