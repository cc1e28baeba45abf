"""The cases that tests share: those of the catalogue, and those of mods for tests alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import catalogue
from flexattn.catalogue import Built, Case, Setup
from flexattn.catalogue.cases import BLOCK
from flexattn.mods.expr import ScoreMod
from tests import odd_mods
from tests.odd_mods import causal_score, checkerboard, half_precision_bias, nested

__all__ = ["CASES", "case", "causal_score", "checkerboard", "half_precision_bias", "nested"]

_WINDOW = 12


def case(name: str) -> Case:
    """The case of that name."""
    return next(each for each in CASES if each.name == name)


def _learned(
    make: Callable[[Tensor, Setup], ScoreMod], table: Callable[[Setup], Tensor]
) -> Callable[[Setup], Built]:
    def build(s: Setup) -> Built:
        values = table(s)
        return Built(make(values, s), None, (values,))

    return build


def _some_rows_empty(s: Setup) -> Built:
    table = s.blocks(1 / 8)
    table[:, :, 1::3] = False
    return Built(mask_mod=catalogue.block_table(table, BLOCK))


def _poisoned_bias(s: Setup) -> Built:
    lengths = s.lengths()
    padded = torch.arange(s.S, device=s.device) >= lengths[:, None]
    bias = s.normal(s.B, s.S).masked_fill(padded, math.nan)
    return Built(odd_mods.key_bias(bias), catalogue.padding(lengths))


def _of_padding(make: Callable[[Tensor], ScoreMod]) -> Callable[[Setup], Built]:
    def build(s: Setup) -> Built:
        lengths = s.lengths()
        return Built(make(lengths), catalogue.padding(lengths))

    return build


def _chained(values: Tensor, s: Setup) -> ScoreMod:
    return odd_mods.chained_index(values, s.integers(0, 7, s.L, s.S))


def _scalar_captures(values: Tensor, s: Setup) -> ScoreMod:
    temperature = torch.tensor(0.625, device=s.device)
    return odd_mods.scalar_captures(temperature, torch.tensor(2, device=s.device), values)


def _window_bias(s: Setup) -> Built:
    table = s.normal(_WINDOW + 1)
    return Built(odd_mods.window_bias(table), catalogue.sliding_window(_WINDOW), (table,))


CASES: tuple[Case, ...] = (
    *catalogue.CASES,
    Case("checkerboard", lambda s: Built(mask_mod=checkerboard(3)), empty_rows=True),
    Case("random_blocks_empty_rows", _some_rows_empty, empty_rows=True),
    Case("causal_score", lambda s: Built(causal_score)),
    Case(
        "half_precision_bias",
        _learned(lambda table, s: half_precision_bias(table), lambda s: s.normal(s.S)),
    ),
    Case("nested", _learned(lambda table, s: nested(0.75, table), lambda s: s.normal(s.Hq))),
    Case("poisoned_bias", _poisoned_bias),
    Case("reciprocal_of_padding", _of_padding(odd_mods.reciprocal_of_padding)),
    Case("log_of_padding", _of_padding(odd_mods.log_of_padding)),
    Case(
        "symmetric_bias",
        _learned(lambda table, s: odd_mods.symmetric_bias(table), lambda s: s.normal(s.longest)),
    ),
    Case("chained_index", _learned(_chained, lambda s: s.normal(s.B, s.Hq, 7))),
    Case("scalar_captures", _learned(_scalar_captures, lambda s: s.normal(3, s.Hq))),
    Case(
        "last_entries",
        _learned(lambda table, s: odd_mods.last_entries(table, s.S), lambda s: s.normal(3, s.S)),
    ),
    Case(
        "wrapping_bias",
        _learned(
            lambda table, s: odd_mods.wrapping_bias(table),
            lambda s: s.normal(s.Hq, 2 * s.longest),
        ),
    ),
    Case("window_bias_out_of_range", _window_bias, empty_rows=True, torch_eager=False),
)
