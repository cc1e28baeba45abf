"""Score mods that break implementations: poison in removed lanes, odd ways to index, scalars."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.catalogue.scores import ScoreMod


def key_bias(bias: Tensor) -> ScoreMod:
    """A bias for each key, which may be NaN where the mask removes the key; bias [B, S]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b, kv_idx]

    score_mod.__name__ = "key_bias"
    return score_mod


def reciprocal_of_padding(lengths: Tensor) -> ScoreMod:
    """1/score, whose score is zero in the padding; lengths int [B]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1.0 / torch.where(kv_idx < lengths[b], score.abs() + 0.5, 0.0)

    score_mod.__name__ = "reciprocal_of_padding"
    return score_mod


def log_of_padding(lengths: Tensor) -> ScoreMod:
    """log(score), whose score is negative in the padding; lengths int [B]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.log(torch.where(kv_idx < lengths[b], score.abs() + 0.5, -1.0))

    score_mod.__name__ = "log_of_padding"
    return score_mod


def symmetric_bias(bias: Tensor) -> ScoreMod:
    """One captured tensor read at two places; bias [max(L, S)]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[q_idx] + bias[kv_idx]

    score_mod.__name__ = "symmetric_bias"
    return score_mod


def chained_index(bias: Tensor, which: Tensor) -> ScoreMod:
    """One index at a time, the last by data; bias [B, Hq, kinds], which int [L, S]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[b][h][which[q_idx, kv_idx]]

    score_mod.__name__ = "chained_index"
    return score_mod


def scalar_captures(temperature: Tensor, row: Tensor, bias: Tensor) -> ScoreMod:
    """Captured 0-d tensors, one in arithmetic and one as an index; bias [rows, Hq]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * temperature + bias[row, h]

    score_mod.__name__ = "scalar_captures"
    return score_mod


def last_entries(bias: Tensor, S: int) -> ScoreMod:
    """Indices that are negative in every lane and wrap; bias [rows, S]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[-1, kv_idx - S]

    score_mod.__name__ = "last_entries"
    return score_mod


def wrapping_bias(table: Tensor) -> ScoreMod:
    """A relative bias with no offset: keys after the query wrap; table [Hq, 2 max(L, S)]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx]

    score_mod.__name__ = "wrapping_bias"
    return score_mod


def window_bias(table: Tensor) -> ScoreMod:
    """A bias for each distance in a window, out of range outside of it; table [window + 1]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx - kv_idx]

    score_mod.__name__ = "window_bias"
    return score_mod
