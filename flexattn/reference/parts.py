"""Gradients of some rows and of some keys of a call, from what its forward saved."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.expr import ScoreMod
from flexattn.problem.inputs import Dropout
from flexattn.reference.oracle import AttentionSlice, Blocks, SomeRows
from flexattn.reference.rounding import Precision, Rounding

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
    """dq [batches, heads, rows, E] of some rows, in the working dtype of the precision.

    Method: as FlashAttention's backward (Dao, arXiv 2205.14135, algorithm 4): weights are made
    anew from lse, and the mod is differentiated by autograd.
    """
    piece = _Piece.of(saved, at, precision)
    keys = torch.arange(saved.k.shape[2], device=saved.q.device)
    total: Tensor | None = None
    for span in keys.split(max(1, _PIECE // (at.rows.numel() * at.h.numel() * at.b.numel()))):
        found = piece.ds(span)[0] @ piece.of_keys(saved.k, span)
        total = found if total is None else total + found
    assert total is not None
    return total * saved.scale


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
    found: list[Tensor] = []
    for span in rows.split(max(1, _PIECE // (keys.numel() * h.numel() * batches.numel()))):
        piece = _Piece.of(saved, SomeRows(batches, h, span, heads), precision)
        ds, weights = piece.ds(keys)
        parts = [
            (x.mT @ piece.of_rows(y)).unflatten(1, (-1, group)).sum(2)
            for x, y in ((ds, saved.q), (weights, saved.dout))
        ]
        found = parts if not found else [x + y for x, y in zip(found, parts, strict=True)]
    if shared_keys:
        found = [x.sum(0, keepdim=True) for x in found]
    return found[0] * saved.scale, found[1]


class _Piece(NamedTuple):
    """Some rows of a call, of which the scores with some keys are made."""

    saved: SavedForward
    at: SomeRows
    run: AttentionSlice

    @classmethod
    def of(cls, saved: SavedForward, at: SomeRows, precision: Precision) -> _Piece:
        mask, rounding = saved.block_mask, Rounding.of(precision, saved.q, saved.v)
        blocks = None if mask is None else Blocks.of(mask, 0, saved.k.shape[2], at)
        run = AttentionSlice(
            saved.score_mod, blocks, saved.scale, rounding, saved.dropout, heads=at.heads, at=at
        )
        return cls(saved, at, run)

    def of_keys(self, x: Tensor, keys: Tensor) -> Tensor:
        """Keys or values [batches, heads, keys, i]."""
        return self.run.rounding.load(self.at.of_keys(x[:, :, keys]))

    def of_rows(self, x: Tensor) -> Tensor:
        """Rows of q, or of what is like the output, [batches, heads, rows, i]."""
        return self.run.rounding.load(self.at.of(x))

    def ds(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the products q k^T times the scale, and the weights that v was given."""
        saved, run, at = self.saved, self.run, self.at
        lanes = at.b, at.h, at.rows, keys
        product = self.of_rows(saved.q) @ self.of_keys(saved.k, keys).mT
        with torch.enable_grad():
            product = (product * saved.scale).detach().requires_grad_()
            scores = run.modified(run.rounding.scores(product), lanes)
        lse = at.of(saved.lse).to(run.rounding.work)
        p = torch.exp(scores.detach() - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        dout, out = self.of_rows(saved.dout), self.of_rows(saved.out)
        dp = dout @ self.of_keys(saved.v, keys).mT
        weights = run.rounding.weights(p)
        drop = run.drop(lanes, scores)
        if drop is not None:
            weights, dp = weights * drop, dp * drop
        delta = (out * dout).sum(-1)
        if saved.dlse is not None:
            delta = delta - at.of(saved.dlse).to(run.rounding.work)
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None]))
        found = None
        if scores.requires_grad:
            (found,) = torch.autograd.grad(scores, product, ds, allow_unused=True)
        # A mod may ignore its score.
        return torch.zeros_like(ds) if found is None else found, weights
