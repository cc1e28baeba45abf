"""The cases that tests share: those of the catalogue, and those of mods for tests alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import catalogue
from flexattn.catalogue import CaseMods, CatalogueCase, Setup
from flexattn.catalogue.entry import BLOCK
from flexattn.mods.signatures import ScoreMod
from tests import odd_mods
from tests.odd_mods import causal_score, checkerboard, half_precision_bias, nested

__all__ = ["CASES", "case", "causal_score", "checkerboard", "half_precision_bias", "nested"]

_WINDOW = 12


def case(name: str) -> CatalogueCase:
    """The case of that name."""
    return next(each for each in CASES if each.name == name)


def _learned(
    make: Callable[[Tensor, Setup], ScoreMod], table: Callable[[Setup], Tensor]
) -> Callable[[Setup], CaseMods]:
    def build(s: Setup) -> CaseMods:
        values = table(s)
        return CaseMods(make(values, s), None, (values,))

    return build


def _some_rows_empty(s: Setup) -> CaseMods:
    table = s.blocks(1 / 8)
    table[:, :, 1::3] = False
    return CaseMods(mask_mod=catalogue.block_table(table, BLOCK))


def _poisoned_bias(s: Setup) -> CaseMods:
    lengths = s.lengths()
    padded = torch.arange(s.S, device=s.device) >= lengths[:, None]
    bias = s.normal(s.B, s.S).masked_fill(padded, math.nan)
    return CaseMods(odd_mods.key_bias(bias), catalogue.padding(lengths))


def _of_padding(make: Callable[[Tensor], ScoreMod]) -> Callable[[Setup], CaseMods]:
    def build(s: Setup) -> CaseMods:
        lengths = s.lengths()
        return CaseMods(make(lengths), catalogue.padding(lengths))

    return build


def _chained(values: Tensor, s: Setup) -> ScoreMod:
    return odd_mods.chained_index(values, s.integers(0, 7, s.L, s.S))


def _scalar_captures(values: Tensor, s: Setup) -> ScoreMod:
    temperature = torch.tensor(0.625, device=s.device)
    return odd_mods.scalar_captures(temperature, torch.tensor(2, device=s.device), values)


def _window_bias(s: Setup) -> CaseMods:
    table = s.normal(_WINDOW + 1)
    return CaseMods(odd_mods.window_bias(table), catalogue.sliding_window(_WINDOW), (table,))


CASES: tuple[CatalogueCase, ...] = (
    *catalogue.CASES,
    CatalogueCase("checkerboard", lambda s: CaseMods(mask_mod=checkerboard(3)), empty_rows=True),
    CatalogueCase("random_blocks_empty_rows", _some_rows_empty, empty_rows=True),
    CatalogueCase("causal_score", lambda s: CaseMods(causal_score)),
    CatalogueCase(
        "half_precision_bias",
        _learned(lambda table, s: half_precision_bias(table), lambda s: s.normal(s.S)),
    ),
    CatalogueCase(
        "nested", _learned(lambda table, s: nested(0.75, table), lambda s: s.normal(s.Hq))
    ),
    CatalogueCase("poisoned_bias", _poisoned_bias),
    CatalogueCase("reciprocal_of_padding", _of_padding(odd_mods.reciprocal_of_padding)),
    CatalogueCase("log_of_padding", _of_padding(odd_mods.log_of_padding)),
    CatalogueCase(
        "symmetric_bias",
        _learned(lambda table, s: odd_mods.symmetric_bias(table), lambda s: s.normal(s.longest)),
    ),
    CatalogueCase("chained_index", _learned(_chained, lambda s: s.normal(s.B, s.Hq, 7))),
    CatalogueCase("scalar_captures", _learned(_scalar_captures, lambda s: s.normal(3, s.Hq))),
    CatalogueCase(
        "last_entries",
        _learned(lambda table, s: odd_mods.last_entries(table, s.S), lambda s: s.normal(3, s.S)),
    ),
    CatalogueCase(
        "wrapping_bias",
        _learned(
            lambda table, s: odd_mods.wrapping_bias(table),
            lambda s: s.normal(s.Hq, 2 * s.longest),
        ),
    ),
    CatalogueCase("window_bias_out_of_range", _window_bias, empty_rows=True, torch_eager=False),
)
