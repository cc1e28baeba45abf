"""Where to start with the Hopper backward: tiles by head dimension, as measured on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.masks import band_of
from flexattn.kernels.hopper_backward.tiles import at_sizes
from flexattn.problem import Problem, Structure

_TALL = HopperBackwardConfig(128, 128, 2)
_WIDE = HopperBackwardConfig(64, 128, 2)
_SPLIT = HopperBackwardConfig(64, 64, 2)


def defaults(problem: Problem) -> Iterator[HopperBackwardConfig]:
    """Configs by preference. What leaves few registers has addresses computed in the loop."""
    structure = problem.structure
    head_dim = structure.head_dim_qk
    plain = _few_registers(structure)
    tiles = (_SPLIT,) if head_dim == 256 else (_TALL, _WIDE) if head_dim == 64 else (_WIDE,)
    for each in tiles:
        config = at_sizes(each, problem)
        bare = plain and config.one_head and config.even_keys
        # Tall tiles have 64 registers of scores, and as many of their gradients.
        if bare or each is not _TALL:
            # A causal one gains 6 % where dk's product goes on beside the next scores.
            masked = each is _SPLIT and structure.mask is not None
            yield replace(config, opaque=masked or not bare, trailing=masked)


def _few_registers(structure: Structure) -> bool:
    """Whether mods take none: no score_mod, and no mask_mod but a band."""
    mask = structure.mask
    return structure.score is None and (mask is None or band_of(mask.mod.expr) is not None)
