"""The softmax of the reference run with a backward that rounds as kernels do.

A kernel saves the output in its dtype and lse in float32, and makes the weights and delta of them
anew. Autograd keeps the weights, and would set a budget that no such kernel can hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexattn.problem.sinks import add_sinks
from flexattn.reference.rounding import Rounding

_LOG2E = 1.0 / math.log(2.0)


def saved_softmax(
    scores: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """out with sinks, and lse as the forward makes it, through base 2; both with gradients.

    scores [b, h, m, n], v [b, kv heads, n, i], sinks [h]; out and lse are without them.

    Method: FlashAttention's backward (Dao, arXiv 2205.14135, algorithm 4), in which a sink is a
    key of value 0.
    """
    out, lse = out.detach(), lse.detach()
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks.detach())
    apply: Any = _Saved.apply
    found: tuple[Tensor, Tensor] = apply(scores, v, sinks, out, lse, rounding)
    return found


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
        rounding: Rounding,
    ) -> tuple[Tensor, Tensor]:
        lse = lse * _LOG2E * math.log(2.0)
        ctx.save_for_backward(scores, v, sinks, rounding.store(out).to(out.dtype), lse)
        ctx.rounding = rounding
        return out.clone(), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        scores, v, sinks, out, lse = ctx.saved_tensors
        b, heads, rows, keys = scores.shape
        kv_heads, width = v.shape[1], v.shape[-1]
        shared = heads * rows // kv_heads
        shift = torch.where(lse == -math.inf, 0.0, lse)
        p = torch.exp(scores - shift[..., None])
        grouped = dout.reshape(b, kv_heads, shared, width)
        dv = ctx.rounding.weights(p).reshape(b, kv_heads, shared, keys).mT @ grouped
        dp = (grouped @ v.mT).reshape(scores.shape)
        delta = (out * dout).sum(-1) - dlse
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None]))
        dsinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - shift)
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return ds, dv, dsinks, None, None, None
