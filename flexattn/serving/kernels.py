"""The kernels of a plan: chosen and built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from flexattn.device import Device, detect
from flexattn.errors import ConfigError, InputError, UnsupportedError
from flexattn.kernels.base.source import Source
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.family import PAGED_DECODE
from flexattn.problem.serving import ServingProblem
from flexattn.runtime.build import Kernel, builder
from flexattn.runtime.dispatch import Candidate, Choice, first_served, open_candidates
from flexattn.runtime.outcomes import memory
from flexattn.settings import current

# What 32 bits count beyond a batch's tiles: kernels add their number of programs.
_UNCOUNTED = 2**16


class Kernels(NamedTuple):
    """What a plan launches. programs: of the serving kernel; merges: of the one that merges.

    combine: None also for a shared prefix, whose parts the last kernel of its cascade merges.
    row_tiles: the most that one KV head has. gpu: its index, -1 where there is none.
    """

    choice: Choice
    config: ServingConfig
    gpu: int
    attend: Kernel
    combine: Kernel | None
    programs: int
    merges: int
    row_tiles: int

    @property
    def target(self) -> Device:
        """The device that they are built for."""
        return self.choice.device


def build(problem: ServingProblem, device: torch.device, config: ServingConfig | None) -> Kernels:
    """Compile a plan's kernels with a config, a tuned one, or the first default that serves.

    Raises ConfigError or BuildError where none does, with what became of each, and InputError for
    a batch of too many tiles.
    """
    if device.type == "cpu" and not current().interpret:
        raise UnsupportedError(
            "a DecodePlan for tensors on the CPU",
            "its kernels run on a GPU, or in Triton's interpreter",
            "set FLEXATTN_INTERPRET=1",
        )
    target = detect(device)
    index = device.index if device.type == "cuda" else -1

    def compiled(source: Source) -> Kernel:
        return builder().kernel(source, target, index)

    found = _counted(plan_candidates(problem, target, config))
    choice, attend, combine = first_served(found, problem, target, compiled, memory())
    chosen: Any = choice.config
    grid = PAGED_DECODE.grid(problem, chosen, target)
    merges = PAGED_DECODE.merges(problem, chosen, target)
    return Kernels(choice, chosen, index, attend, combine, grid.programs, merges, grid.num_tiles)


def plan_candidates(
    problem: ServingProblem, target: Device, config: ServingConfig | None
) -> Iterator[Candidate]:
    """What to try in turn: the caller's config alone, or a record's, then the static defaults."""
    if config is None:
        yield from open_candidates(problem, target)
        return
    found = PAGED_DECODE.limits.reasons(config, problem.structure, target)
    if found:
        raise ConfigError(f"{config}", "; ".join(found), "leave config None for the default")
    yield Candidate(problem, target, config, "forced", "config=", True)


def _counted(found: Iterator[Candidate]) -> Iterator[Candidate]:
    """The candidates; raises InputError where the tiles of a batch are more than 32 bits count."""
    for each in found:
        tiles = PAGED_DECODE.grid(each.problem, each.config, each.device).num_work_tiles
        if tiles >= 2**31 - _UNCOUNTED:
            raise InputError(
                f"{each.problem.describe()} makes {tiles} tiles",
                "the tiles of a batch are counted in 32 bits",
                "plan for fewer requests or keys",
            )
        yield each
