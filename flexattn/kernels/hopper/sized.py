"""Hopper's prefill configs for sizes: what the rules put first, as few or short tiles want it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexattn.device import Device
from flexattn.kernels.base.estimate import best_first
from flexattn.kernels.base.feasibility import Feasibility
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.cost import expected
from flexattn.kernels.hopper.space import preferences
from flexattn.problem import Problem


def sized(
    problem: Problem, device: Device, feasibility: Feasibility
) -> Iterator[HopperPrefillConfig]:
    """The preferences of a structure, and before them what the sizes are expected to want more."""
    return best_first(
        preferences(problem.structure),
        alternatives(problem),
        lambda config: expected(problem, config, device),
        lambda config: not feasibility.violated(config, problem.structure, device),
    )


def alternatives(problem: Problem) -> Iterator[HopperPrefillConfig]:
    """What sizes may change: rows of a tile, whose tiles run together, and what pays in the long run.

    A mask that makes tiles of all heads as long as each other has no order to gain from.
    """
    structure = problem.structure
    masked = structure.sparsity is not None
    seen: set[int] = set()
    for each in preferences(structure):
        if each.consumers in seen:
            continue
        seen.add(each.consumers)
        for lazy in {each.lazy_rescale, False}:
            found = replace(each, lazy_rescale=lazy)
            yield found
            if masked:
                yield replace(found, order="heads", l2_swizzle=8)
            elif each.tile_scheduler != "grid":
                yield replace(found, cross_tile_pipeline=not each.cross_tile_pipeline)
