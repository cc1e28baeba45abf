"""Gradients of some rows and of some keys of a call, from what its forward saved."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.expr import ScoreMod
from flexattn.problem.inputs import Dropout
from flexattn.reference.oracle import AttentionSlice, Blocks, SomeRows
from flexattn.reference.rounding import Precision, Rounding, saved_softmax

# Scores of a piece, each in some ten tensors of the working dtype.
_PIECE = 2**20


class SavedForward(NamedTuple):
    """A differentiated call: its inputs, what its forward saved, and the gradients of that.

    q, out, dout [B, Hq, L, E or Ev], k, v [B or 1, Hkv, S, E or Ev], lse [B, Hq, L] with sinks,
    dlse like it or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    dropout: Dropout | None
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def gradient_of_rows(saved: SavedForward, at: SomeRows, precision: Precision) -> Tensor:
    """dq [batches, heads, rows, E] of some rows, in the working dtype of the precision."""
    keys = torch.arange(saved.k.shape[2], device=saved.q.device)
    spans = keys.split(max(1, _PIECE // (at.rows.numel() * at.h.numel() * at.b.numel())))
    return _total(_gradients(saved, at, span, precision)[:1] for span in spans)[0]


def gradients_of_keys(
    saved: SavedForward, b: Tensor, kv_heads: Tensor, keys: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """dk [batches, KV heads, keys, E] and dv of some keys, over all rows that may attend to them.

    b: batches of the keys. Where all batches share the keys, theirs are summed.
    """
    heads = saved.q.shape[1]
    group = heads // saved.k.shape[1]
    device, shared_keys = saved.q.device, saved.k.shape[0] < saved.q.shape[0]
    h = (kv_heads[:, None] * group + torch.arange(group, device=device)).flatten()
    batches = torch.arange(saved.q.shape[0], device=device) if shared_keys else b
    rows = torch.arange(saved.q.shape[2], device=device)
    spans = rows.split(max(1, _PIECE // (keys.numel() * h.numel() * batches.numel())))
    pieces = (SomeRows(batches, h, span, heads) for span in spans)
    found = _total(_gradients(saved, at, keys, precision)[1:] for at in pieces)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in found)
    return (dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)) if shared_keys else (dk, dv)


def _total(pieces: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The sums of the tensors of all pieces, place by place."""
    return reduce(lambda one, other: tuple(map(torch.add, one, other)), pieces)


def _gradients(
    saved: SavedForward, at: SomeRows, keys: Tensor, precision: Precision
) -> tuple[Tensor, ...]:
    """dq of some rows by some keys alone, and dk and dv of these, for each query head.

    Method: `saved_softmax` makes the weights anew from lse, and autograd does the rest.
    """
    mask, rounding = saved.block_mask, Rounding.of(precision, saved.q, saved.v)
    blocks = None if mask is None else Blocks.of(mask, 0, saved.k.shape[2], at)
    run = AttentionSlice(saved.score_mod, blocks, saved.scale, rounding, saved.dropout, at=at)
    lanes = at.b, at.h, at.rows, keys
    k, v = (at.of_keys(x[:, :, keys]) for x in (saved.k, saved.v))
    inputs = [rounding.load(x).requires_grad_() for x in (at.of(saved.q), k, v)]
    out, dout = (rounding.load(at.of(x)) for x in (saved.out, saved.dout))
    lse = at.of(saved.lse).to(rounding.work)
    dlse = torch.zeros_like(lse) if saved.dlse is None else at.of(saved.dlse).to(lse.dtype)
    with torch.enable_grad():
        q, k, v = inputs
        scores = run.modified(rounding.scores(q @ k.mT * saved.scale), lanes)
        made = saved_softmax(scores, v, None, out, lse, run.drop(lanes, scores), rounding)
    return torch.autograd.grad(made, inputs, (dout, dlse), materialize_grads=True)
