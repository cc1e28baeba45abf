"""Gradients of some rows and of some keys of a call, from what its forward saved."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.signatures import ScoreMod
from flexattn.problem.dropout import Dropout
from flexattn.reference.oracle import AttentionSlice, Blocks, SomeRows, shared
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


def gradient_of_rows(
    saved: SavedForward, b: int, h: int, rows: Tensor, precision: Precision
) -> Tensor:
    """dq [rows, E] of rows of a query head, in the working dtype of the precision.

    Method: as FlashAttention's backward (Dao, arXiv 2205.14135, algorithm 4): weights are made
    anew from lse, and the mod is differentiated by autograd.
    """
    group = saved.q.shape[1] // saved.k.shape[1]
    piece = _Piece.of(saved, b, slice(h, h + 1), h // group, precision)
    keys = torch.arange(saved.k.shape[2], device=saved.q.device)
    total = None
    for span in keys.split(max(1, _PIECE // rows.numel())):
        found = piece.ds(rows, span)[0] @ piece.load(saved.k, span)
        total = found if total is None else total + found
    assert total is not None
    return total[0, 0] * saved.scale


def gradients_of_keys(
    saved: SavedForward, b: int, kv_head: int, keys: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """dk [keys, E] and dv [keys, Ev] of keys of a KV head, over all rows that may attend to them.

    b: of all batches where these share the keys.
    """
    group = saved.q.shape[1] // saved.k.shape[1]
    heads = slice(kv_head * group, (kv_head + 1) * group)
    batches = range(saved.q.shape[0]) if saved.k.shape[0] == 1 else (b,)
    rows = torch.arange(saved.q.shape[2], device=saved.q.device)
    dk = dv = None
    for batch in batches:
        piece = _Piece.of(saved, batch, heads, kv_head, precision)
        for span in rows.split(max(1, _PIECE // (keys.numel() * group))):
            ds, weights = piece.ds(span, keys)
            q, dout = piece.of_rows(saved.q, span), piece.of_rows(saved.dout, span)
            parts = (ds.mT @ q).sum((0, 1)), (weights.mT @ dout).sum((0, 1))
            dk, dv = parts if dk is None or dv is None else (dk + parts[0], dv + parts[1])
    assert dk is not None and dv is not None
    return dk * saved.scale, dv


class _Piece(NamedTuple):
    """Query heads of a batch that share a KV head, of which some rows by some keys are made."""

    saved: SavedForward
    b: int
    heads: slice
    kv_head: int
    run: AttentionSlice

    @classmethod
    def of(
        cls, saved: SavedForward, b: int, heads: slice, kv_head: int, precision: Precision
    ) -> _Piece:
        at = SomeRows(b, heads.start, torch.empty(0, device=saved.q.device), saved.q.shape[1])
        mask, rounding = saved.block_mask, Rounding.of(precision, saved.q, saved.v)
        blocks = None if mask is None else Blocks.of(mask, 0, saved.k.shape[2], at)
        run = AttentionSlice(
            saved.score_mod, blocks, saved.scale, rounding, saved.dropout, heads=at.heads, at=at
        )
        return cls(saved, b, heads, kv_head, run)

    def load(self, x: Tensor, keys: Tensor) -> Tensor:
        """Keys or values, [1, 1, keys, i]."""
        b = min(self.b, x.shape[0] - 1)
        return self.run.rounding.load(x[b : b + 1, self.kv_head : self.kv_head + 1, keys])

    def of_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """SomeRows of q, or of what is like the output, [1, heads, rows, i]."""
        return self.run.rounding.load(x[self.b : self.b + 1, self.heads, rows])

    def ds(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the products q k^T times the scale, and the weights that v was given."""
        saved, run = self.saved, self.run
        device = rows.device
        lanes = (
            torch.tensor([self.b], device=device),
            torch.arange(self.heads.start, self.heads.stop, device=device), rows, keys,
        )  # fmt: skip
        product = shared(torch.matmul, self.of_rows(saved.q, rows), self.load(saved.k, keys).mT)
        with torch.enable_grad():
            product = (product * saved.scale).detach().requires_grad_()
            scores = run.modified(run.rounding.scores(product), lanes)
        lse = self._statistic(saved.lse, rows)
        p = torch.exp(scores.detach() - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        dout, out = self.of_rows(saved.dout, rows), self.of_rows(saved.out, rows)
        dp = shared(torch.matmul, dout, self.load(saved.v, keys).mT)
        weights = run.rounding.weights(p)
        drop = run.drop(lanes, scores)
        if drop is not None:
            weights, dp = weights * drop, dp * drop
        delta = (out * dout).sum(-1)
        if saved.dlse is not None:
            delta = delta - self._statistic(saved.dlse, rows)
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None]))
        found = None
        if scores.requires_grad:
            (found,) = torch.autograd.grad(scores, product, ds, allow_unused=True)
        # A mod may ignore its score.
        return torch.zeros_like(ds) if found is None else found, weights

    def _statistic(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[self.b : self.b + 1, self.heads, rows].to(self.run.rounding.work)
