"""Hopper's prefill configs for sizes: what the rules put first, as few or short tiles want it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from flexattn.device import Device
from flexattn.kernels.base.estimate import best_first
from flexattn.kernels.base.feasibility import Feasibility
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.cost import expected
from flexattn.kernels.hopper.grid import shares_keys
from flexattn.kernels.hopper.space import preferences
from flexattn.problem import Problem


def sized(
    problem: Problem, device: Device, feasibility: Feasibility
) -> Iterator[HopperPrefillConfig]:
    """The preferences of a structure, and before them what the sizes are expected to want more."""
    rules = list(preferences(problem.structure))
    return best_first(
        rules,
        alternatives(problem, rules),
        lambda config: expected(problem, config, device),
        lambda config: not feasibility.violated(config, problem.structure, device),
    )


def alternatives(
    problem: Problem, rules: Sequence[HopperPrefillConfig]
) -> Iterator[HopperPrefillConfig]:
    """The first preference with one thing changed that sizes decide: five kernels at most.

    Fewer rows of a tile, or heads of a group that share one; each softmax rescaled at once, where
    keys are few; heads side by side where a mask makes their tiles uneven, else tiles that end
    before the next one begins.
    """
    first = rules[0]
    yield from islice((each for each in rules if each.consumers < first.consumers), 1)
    if problem.Hq > problem.Hkv and problem.q_len <= first.BLOCK_M // 2:
        packed = preferences(problem.structure, pack_gqa=True)
        sharing = (each for each in packed if each.heads > 1 and shares_keys(problem, each))
        yield from islice(sharing, 1)
    if first.lazy_rescale:
        yield replace(first, lazy_rescale=False)
    if problem.structure.sparsity is not None:
        yield replace(first, order="heads", l2_swizzle=8)
    elif first.cross_tile_pipeline and first.tile_scheduler != "grid":
        yield replace(first, cross_tile_pipeline=False)
