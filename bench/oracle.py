"""The accuracy gate of a bench row: the oracle on slices of a shape too large to judge whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from bench.inputs import Inputs
from flexattn.measure.gate import Verdict, judge
from flexattn.reference import Precision, Reference, attention

__all__ = ["judge_slices"]

SLICE_ROWS = 64


def judge_slices(out: Tensor, inputs: Inputs) -> Verdict:
    """Judge `out` at the first, middle and last query rows of three heads; the worst verdict wins.

    Each slice is judged by itself, so that long rows, whose values are small, are not excused by
    the larger errors of short ones.
    """
    shape = inputs.row.shape
    if out.shape != inputs.q.shape:
        return Verdict((), (f"out has shape {tuple(out.shape)}, not {tuple(inputs.q.shape)}",), ())
    verdicts = []
    for b, h in _corners(shape.batch, shape.hq):
        for first in _corners_of(shape.q_len - SLICE_ROWS):
            last = min(first + SLICE_ROWS, shape.q_len)
            oracle = _run(inputs, b, h, first, last, Precision.ORACLE)
            rounded = _run(inputs, b, h, first, last, Precision.ROUNDED)
            got = out[b : b + 1, h : h + 1, first:last]
            verdicts.append(judge((got, None, None), oracle, rounded, out.dtype))
    return max(verdicts, key=_badness)


def _badness(verdict: Verdict) -> tuple[int, float]:
    used = [row.error / row.budget if row.budget else float(row.error > 0) for row in verdict.rows]
    return len(verdict.faults), max(used, default=0.0)


def _corners_of(last: int) -> list[int]:
    return sorted({0, max(last, 0) // 2, max(last, 0)})


def _corners(batch: int, heads: int) -> list[tuple[int, int]]:
    return sorted({(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)})


def _run(x: Inputs, b: int, h: int, first: int, last: int, precision: Precision) -> Reference:
    """Query rows first..last of one head, with mods that are told where the slice stands."""
    kv = h // (x.row.shape.hq // x.row.shape.hkv)
    score_mod, block_mask = None, None
    if x.score_mod is not None:
        user_score = x.score_mod

        def score_mod(
            score: Tensor, b_: Tensor, h_: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return user_score(score, b_ + b, h_ + h, q_idx + first, kv_idx)

    if x.mask_mod is not None:
        user_mask = x.mask_mod

        def mask_mod(b_: Tensor, h_: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return user_mask(b_ + b, h_ + h, q_idx + first, kv_idx)

        block_mask = create_block_mask(
            mask_mod, None, None, last - first, x.row.shape.kv_len, x.q.device
        )
    with torch.no_grad():
        return attention(
            x.q[b : b + 1, h : h + 1, first:last],
            x.k[b : b + 1, kv : kv + 1],
            x.v[b : b + 1, kv : kv + 1],
            score_mod=score_mod,
            block_mask=block_mask,
            precision=precision,
        )
