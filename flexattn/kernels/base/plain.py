"""PlainFamily: what most families answer alike, so that one's folder says what is its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from flexattn.device import Device
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.family import Around
from flexattn.kernels.base.knobs import at_rest, words
from flexattn.kernels.base.source import Source
from flexattn.kernels.base.tiles import Geometry, check_power
from flexattn.problem import Problem, Structure

__all__ = ["PlainFamily"]

C = TypeVar("C", bound=Config)
_NUMBERS = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


class PlainFamily(Generic[C]):
    """Answers of KernelFamily for a template of one kernel, which every device can compile.

    A family still says its name, kind, language and feasibility; its defaults, axes and grid; and
    what it renders.
    """

    def offered(self, device: Device) -> bool:
        return True

    def leads(self, structure: Structure, device: Device) -> bool:
        return True

    def variants(self, config: C) -> Iterator[C]:
        yield config

    def tile(self, config: C) -> C:
        return at_rest(config)

    def uncompiled(self, config: C) -> C:
        return config

    def of_this_compiler(self, config: C) -> C:
        return config

    def fit_to_mask(self, config: C, structure: Structure) -> C:
        return config

    def without_hints(self, config: C, structure: Structure, device: Device) -> C:
        return config

    def check_rows(self, rows: int) -> None:
        check_power("BLOCK_M", rows)

    def forced(self, config: C, numbers: Mapping[str, Any]) -> C:
        """The config with those of the numbers that it has a field for."""
        names = {field.name for field in fields(config)}
        return replace(config, **{name: numbers[name] for name in names & numbers.keys()})

    def options_of(self, config: C) -> dict[str, int | bool | str]:
        return {name: getattr(config, name) for name in _NUMBERS}

    def at_sizes(self, config: C, measured: Problem, problem: Problem, device: Device) -> C:
        return config

    def combine(self, structure: Structure, device: Device) -> Source | None:
        return None

    def values_kernel(self, structure: Structure, config: C, device: Device) -> Source | None:
        return None

    def around(self, problem: Problem, config: C, device: Device) -> Around | None:
        return None

    def bind(self, problem: Problem, config: C, grid: Geometry) -> dict[str, Any]:
        return {}

    def launch_key(self, config: C) -> tuple[object, ...]:
        return config.BLOCK_M, config.num_warps

    def short(self, config: C) -> str:
        """128x64 w4 s2, and the words of the knobs that are turned."""
        tile = f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}"
        return " ".join([tile, *words(config)])
