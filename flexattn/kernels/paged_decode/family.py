"""Paged decode as a family: what a DecodePlan launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import Geometry, Language
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import TILE_ROWS, ServingConfig
from flexattn.kernels.paged_decode.limits import SERVING_LIMITS
from flexattn.kernels.paged_decode.merge_shape import merge_shape
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.kernels.paged_decode.space import serving_axes, serving_defaults
from flexattn.problem import Kind

# Told in a table's cell without their names.
_NAMELESS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "per_sm", "combine")


class _PagedDecode(KernelFamily[ServingConfig]):
    """Problems and structures are those of flexattn.problem.serving."""

    name = "paged_decode"
    kind: Kind = "serving"
    language: Language = "triton"
    limits = SERVING_LIMITS
    quick = 32

    def defaults(self, problem: Any, device: Device) -> Iterator[ServingConfig]:
        return serving_defaults(problem, device)

    def axes(self, problem: Any, device: Device, effort: Effort) -> Iterator[ServingConfig]:
        return serving_axes(problem, device)

    def tile(self, config: ServingConfig) -> ServingConfig:
        return config

    def template(self, config: ServingConfig) -> str:
        return config.template

    def grid(self, problem: Any, config: Any, device: Device) -> Geometry:
        """Of the largest batch; programs share tiles out among them, whatever there are."""
        packed, B, q_len = problem.Hq // problem.Hkv, problem.B, problem.q_len
        tiles = B * -(-q_len * packed // config.BLOCK_M)
        if problem.total_q:
            tiles = -(-q_len * packed // config.BLOCK_M) + B
        work_tiles = tiles * problem.Hkv * (-(-problem.kv_len // config.BLOCK_N) + 1)
        return Geometry(config.programs(device), tiles, work_tiles)

    def merges(self, problem: Any, config: ServingConfig, device: Device) -> int:
        """Programs of the second kernel."""
        return merge_shape(problem.structure, config, device).grid(config.programs(device))

    def render(self, structure: Any, config: ServingConfig, device: Device, title: str) -> Source:
        return render_serving(structure, config, device, title)

    def sources(
        self, structure: Any, config: ServingConfig, device: Device, title: str
    ) -> tuple[Source, ...]:
        """The kernel, and the second one that merges where the config has one.

        The parts of a shared prefix are merged by the last kernel of its cascade.
        """
        attend = render_serving(structure, config, device, title)
        if not config.merges_apart or structure.prefix:
            return (attend,)
        return attend, render_serving_combine(structure, config, device)

    def serves(self, config: ServingConfig, measured: Any, problem: Any, device: Device) -> bool:
        """Whether as many rows were measured, or a tile holds these as well as the default's.

        Several short tiles would each read the keys again, and a tall one computes rows of nobody.
        """
        rows: int = problem.structure.rows
        if measured.structure.rows == rows:
            return True
        height = next(self.able(problem, device)).BLOCK_M
        return min(rows, height) <= config.BLOCK_M <= max(TILE_ROWS, height)

    def launch_key(self, config: ServingConfig) -> tuple[object, ...]:
        """The whole config: how many programs run and what merges them is not in the code."""
        return (config,)

    def short(self, config: ServingConfig) -> str:
        """16x64 w4 s3 p2 last has two programs on an SM, the last of which merges."""
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"]
        parts += [f"p{config.per_sm}", config.combine]
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in _NAMELESS and value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)


PAGED_DECODE = _PagedDecode()
