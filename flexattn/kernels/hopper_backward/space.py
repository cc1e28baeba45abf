"""Configs of the Hopper backward: where to start, and what a search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flexattn.kernels.base.knobs import turned
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, columns
from flexattn.kernels.hopper_backward.masks import band_of
from flexattn.kernels.hopper_backward.tiles import at_sizes
from flexattn.problem import Problem, Structure

_TALL = HopperBackwardConfig(128, 128, 2)
_WIDE = HopperBackwardConfig(64, 128, 2)
_SPLIT = HopperBackwardConfig(64, 64, 2)


def defaults(problem: Problem) -> Iterator[HopperBackwardConfig]:
    """Configs by preference, as measured on an H200 by their tiles' widths.

    What leaves few registers has addresses computed in the loop.
    """
    structure = problem.structure
    width = columns(structure)
    plain = _few_registers(structure)
    tiles = (_SPLIT,) if width == 256 else (_TALL, _WIDE) if width == 64 else (_WIDE,)
    for each in tiles:
        config = at_sizes(each, problem)
        bare = plain and config.mha and config.even_n
        # Tall tiles have 64 registers of scores, and as many of their gradients.
        if bare or each is not _TALL:
            masked = each is _SPLIT and structure.mask is not None
            yield replace(
                config, remat=masked or not bare, pipelined="dk" if masked else config.pipelined
            )


def axes(problem: Problem, every: bool) -> Iterator[HopperBackwardConfig]:
    """What a search may try; every: all settings of the knobs on all tiles."""
    for rows, keys, stages in product((64, 128), (64, 128), (1, 2, 3) if every else (2, 3)):
        config = at_sizes(HopperBackwardConfig(rows, keys, stages), problem)
        if every:
            yield from turned(config, problem.structure)
        else:
            yield from _forms(config, problem.structure)


def _forms(config: HopperBackwardConfig, structure: Structure) -> Iterator[HopperBackwardConfig]:
    """The pipelines with the registers that they leave, each with the rest turned or not."""
    pipelines = (
        replace(config),
        replace(config, remat=True),
        replace(config, early_stats=True),
        replace(config, pipelined="dk"),
        replace(config, pipelined="dk", remat=True, dk_rs=False),
        replace(config, pipelined="dq", remat=True, dk_rs=False),
        replace(config, pipelined="dq", remat=True),
    )
    powers = (0, 2) if structure.dtype == "bfloat16" else (0,)
    shifts = (False, True) if structure.sparsity is None else (False,)
    for each, turns, ex2, shift in product(pipelines, (False, True), powers, shifts):
        yield replace(each, ping_pong=turns, ex2_emulated=ex2, shift_rows=shift)


def _few_registers(structure: Structure) -> bool:
    """Whether mods take none: no score_mod, and no mask_mod but a band."""
    mask = structure.mask
    return structure.score is None and (mask is None or band_of(mask.mod.expr) is not None)
