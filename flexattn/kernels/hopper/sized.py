"""Hopper's prefill configs for sizes: what the rules put first, as few or short tiles want it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from flexattn.device import Device
from flexattn.kernels.base.estimate import best_first
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.cost import expected
from flexattn.kernels.hopper.grid import shares_keys
from flexattn.kernels.hopper.limits import LIMITS
from flexattn.kernels.hopper.space import preferences
from flexattn.problem import Problem


def sized(problem: Problem, device: Device) -> Iterator[HopperPrefillConfig]:
    """The preferences of a structure, and before them what the sizes are expected to want more."""

    def can_run(config: HopperPrefillConfig) -> bool:
        return not LIMITS.violated(config, problem.structure, device)

    rules = list(preferences(problem.structure))
    return best_first(
        rules,
        alternatives(problem, list(filter(can_run, rules))),
        lambda config: expected(problem, config, device),
        can_run,
    )


def alternatives(
    problem: Problem, rules: Sequence[HopperPrefillConfig]
) -> Iterator[HopperPrefillConfig]:
    """What sizes change of the first preference: six kernels at most.

    Fewer rows of a tile, or heads of a group that share one; each softmax rescaled at once, where
    keys are few; heads side by side where a mask makes their tiles uneven, else tiles that end
    before the next one begins, which goes well with few keys too.
    """
    if not rules:
        return
    first = rules[0]
    shorter = list(islice((each for each in rules if each.consumers < first.consumers), 1))
    yield from shorter
    if problem.Hq > problem.Hkv and problem.q_len <= first.BLOCK_M // 2:
        packed = preferences(problem.structure, pack_gqa=True)
        sharing = (each for each in packed if each.heads > 1 and shares_keys(problem, each))
        yield from islice(sharing, 1)
    dense = problem.structure.sparsity is None
    for each in (first, *shorter):
        if each.lazy_rescale:
            at_once = replace(each, lazy_rescale=False)
            yield _drained(at_once) if dense else at_once
    if not dense:
        yield replace(first, order="heads", l2_swizzle=8)
    elif _drained(first) != first:
        yield _drained(first)


def _drained(config: HopperPrefillConfig) -> HopperPrefillConfig:
    """The config with tiles that end before the next one begins, if its blocks stay."""
    return replace(config, cross_tile_pipeline=False) if config.persistent else config
