"""Mods for tests alone: poison in removed lanes, odd ways to index, scalars, casts, nests."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.catalogue import softcap
from flexattn.mods.expr import MaskMod, ScoreMod


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


def checkerboard(cell: int) -> MaskMod:
    """Every other square of `cell` x `cell` lanes."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // cell + kv_idx // cell) % 2 == 0

    mask_mod.__name__ = f"checkerboard_{cell}"
    return mask_mod


def causal_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal attention by a score of minus infinity, with no mask."""
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def half_precision_bias(bias: Tensor) -> ScoreMod:
    """Casts of every kind: bfloat16 arithmetic on a bias, a double sum, a half step; bias [S].

    The score itself is not rounded: where two precisions round it to different neighbours there
    is no one right answer for a gate to ask for.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        low = bias[kv_idx].to(torch.bfloat16) * 1.5 + 0.125
        step = (q_idx.to(torch.float32) * 0.5).to(torch.int32) % 3
        return (score.to(torch.float64) + low).to(torch.float32) + step.to(torch.float16)

    score_mod.__name__ = "half_precision_bias"
    return score_mod


def nested(factor: float, bias: Tensor) -> ScoreMod:
    """A mod inside a mod inside a mod, each with a capture of its own; bias [Hq]."""

    def with_factor(inner: ScoreMod) -> ScoreMod:
        def outer_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(s * factor, b, h, q_idx, kv_idx)

        return outer_mod

    def with_bias(inner: ScoreMod) -> ScoreMod:
        def middle_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(s + bias[h], b, h, q_idx, kv_idx)

        return middle_mod

    score_mod = with_factor(with_bias(softcap(20.0)))
    score_mod.__name__ = "nested"
    return score_mod
