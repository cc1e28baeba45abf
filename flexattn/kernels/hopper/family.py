"""Hopper's prefill as a family: a warp-specialised template in Gluon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Language
from flexattn.kernels.base.family import Effort
from flexattn.kernels.base.feasibility import Feasibility
from flexattn.kernels.base.features import FEW_BY_KEY, values_by_key
from flexattn.kernels.base.source import Source
from flexattn.kernels.base.tiles import Geometry
from flexattn.kernels.hopper import printed, space
from flexattn.kernels.hopper.case import case_of
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, CONSUMER_ROWS, GluonPrefillConfig
from flexattn.kernels.hopper.grid import fit_to_mask, grid, with_consumers
from flexattn.kernels.hopper.narrow_values import render_narrow_values
from flexattn.kernels.hopper.source import render
from flexattn.kernels.ptx.assembler import preferred
from flexattn.problem import Kind, Problem, Structure

__all__ = ["PREFILL"]

# The one switch: whether it serves prefills on Hopper that nobody tuned. Either way another family
# serves what this one cannot, and a tuner chooses between both.
LEADS = True


class _Prefill:
    name = "hopper"
    kind: Kind = "prefill"
    language: Language = "gluon"
    feasibility = Feasibility(printed.RULES, case_of, printed.estimate)

    def offered(self, device: Device) -> bool:
        return space.offered() and device.has_wgmma

    def leads(self, structure: Structure, device: Device) -> bool:
        if structure.fp8:
            return True
        if structure.kv_dtype or structure.dtype == "float32":
            return False
        return LEADS and self.offered(device) and values_by_key(structure) <= FEW_BY_KEY

    def defaults(self, problem: Problem, device: Device) -> Iterator[GluonPrefillConfig]:
        return space.preferences(problem.structure)

    def variants(self, config: GluonPrefillConfig) -> Iterator[GluonPrefillConfig]:
        return space.forms(config)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[GluonPrefillConfig]:
        return space.axes(problem, effort == "exhaustive")

    def tile(self, config: GluonPrefillConfig) -> GluonPrefillConfig:
        plain = replace(config, ping_pong=False, schedule="grid", section=8, watched=False)
        return replace(plain, order="last", early_loads=True)

    def uncompiled(self, config: GluonPrefillConfig) -> GluonPrefillConfig:
        return replace(config, merge_consumers=True, ptxas="")

    def of_this_compiler(self, config: GluonPrefillConfig) -> GluonPrefillConfig:
        """The other Triton brought other assemblers."""
        return replace(config, ptxas=preferred())

    def fit_to_mask(self, config: GluonPrefillConfig, structure: Structure) -> GluonPrefillConfig:
        return fit_to_mask(config, structure)

    def without_hints(
        self, config: GluonPrefillConfig, structure: Structure, device: Device
    ) -> GluonPrefillConfig:
        return config

    def check_rows(self, rows: int) -> None:
        if rows < CONSUMER_ROWS or rows % CONSUMER_ROWS:
            raise ConfigError(
                f"kernel_options['BLOCK_M']={rows} with the Gluon template",
                f"each of its consumers has {CONSUMER_ROWS} rows",
                f"use {CONSUMER_ROWS}, {2 * CONSUMER_ROWS} or {3 * CONSUMER_ROWS}",
            )

    def forced(self, config: GluonPrefillConfig, numbers: Mapping[str, Any]) -> GluonPrefillConfig:
        """Rows are a number of consumers; its warps and its loads are no choice."""
        names = ("BLOCK_N", "num_stages", "merge_consumers", "ptxas")
        config = replace(config, **{name: numbers[name] for name in names if name in numbers})
        return with_consumers(config, numbers.get("BLOCK_M", config.all_rows) // CONSUMER_ROWS)

    def options_of(self, config: GluonPrefillConfig) -> dict[str, int | bool | str]:
        rows, keys, stages = config.all_rows, config.BLOCK_N, config.num_stages
        return {"BACKEND": "GLUON", "BLOCK_M": rows, "BLOCK_N": keys, "num_stages": stages}

    def grid(self, problem: Problem, config: GluonPrefillConfig, device: Device) -> Geometry:
        return grid(problem, config, device)

    def at_sizes(
        self, config: GluonPrefillConfig, measured: Problem, problem: Problem, device: Device
    ) -> GluonPrefillConfig:
        return config

    def render(
        self, structure: Structure, config: GluonPrefillConfig, device: Device, title: str
    ) -> Source:
        return render(structure, config, device, title)

    def combine(self, structure: Structure, device: Device) -> Source | None:
        return None

    def values_kernel(
        self, structure: Structure, config: GluonPrefillConfig, device: Device
    ) -> Source | None:
        """What turns V of fp8 round, where it stays in 8 bits."""
        return render_narrow_values(structure.head_dim_v, device) if config.narrow else None

    def bind(self, problem: Problem, config: GluonPrefillConfig, grid: Geometry) -> dict[str, Any]:
        return {"num_units": grid.num_units}

    def launch_key(self, config: GluonPrefillConfig) -> tuple[object, ...]:
        return config.BLOCK_M, config.num_warps

    def short(self, config: GluonPrefillConfig) -> str:
        """128x128 c2 s2 turns static heads has two consumers that take turns."""
        parts = [f"{config.BLOCK_M}x{config.BLOCK_N} c{config.consumers} s{config.num_stages}"]
        if config.registers != CONSUMER_REGISTERS.get(config.consumers):
            parts.append(f"r{config.registers}")
        if config.q_registers:
            parts.append(f"q{config.q_registers}")
        flags = ("watched", "packed", "narrow")
        parts += [flag for flag in flags if getattr(config, flag)]
        parts += ["apart"] * (not config.chained)
        parts += ["long turns" if config.long_turns else "turns"] * config.ping_pong
        parts += [config.schedule] * (config.schedule != "grid")
        if config.order != "last":
            parts.append(config.order + str(config.section) * (config.order == "sections"))
        return " ".join(parts + ["late"] * (not config.early_loads))


PREFILL = _Prefill()
