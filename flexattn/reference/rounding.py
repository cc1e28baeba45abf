"""The rounding of the oracle, the reference run and the CPU path: the base of the accuracy rule.

The softmax of the reference run has a backward that rounds as kernels do: a kernel saves the
output in its dtype and lse in float32, and makes the weights and delta of them anew. Autograd
keeps the weights, and would set a budget that no such kernel can hold.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.problem import FP8, out_dtype
from flexattn.problem.inputs import add_sinks

# Weights of e4m3, whose largest number is 448, are held that much larger.
RAISED = 256.0
# So many products of e4m3 are added at a time by Hopper's tensor cores. They cut off what is below
# 2^-13 of the largest of these and of the sum so far, whose exponents alone count.
ADDED, KEPT = 32, 2.0**-13
_EXPONENT = 0x7F800000  # of a float32


class Precision(enum.Enum):
    """The rounding of a run: see the accuracy rule.

    ORACLE computes and returns float64. ROUNDED is the reference run whose error sets the budget:
    QK^T and P are rounded to the inputs' dtype (tf32 where torch allows it), all else is fp32. For
    e4m3 QK^T is summed as Hopper sums it and rounded to bfloat16, the output's dtype: no kernel
    has scores in eight bits. No score errs by less than such sums do in the root mean square. P,
    at most 1, takes e4m3's range, unless V has 16 bits. Its gradients are those of a kernel that
    saves the output and lse: gradients of scores are rounded where the scores were.
    WORKING is the CPU path: fp32, or float64 for float64 inputs, with `out` in q's dtype, or
    bfloat16 for e4m3. STORED is what a kernel's forward leaves for a backward: as ROUNDED, but
    scores stay in fp32, as kernels keep them, so that weights made anew from lse add up to 1.
    Those of e4m3 are too large, all of them, by what sums lose.
    """

    ORACLE = "oracle"
    ROUNDED = "rounded"
    WORKING = "working"
    STORED = "stored"


@dataclass(frozen=True)
class Rounding:
    """The dtype to which each value is rounded on its way; `work` is the dtype of computation.

    saves: a backward starts from the output and lse as they are stored, as a kernel's does. eight:
    Q and K are multiplied in e4m3.
    """

    work: torch.dtype
    score: torch.dtype | None
    weight: torch.dtype | None
    out: torch.dtype
    tf32: bool = False
    saves: bool = False
    eight: bool = False

    @classmethod
    def of(cls, precision: Precision, q: Tensor, v: Tensor) -> Rounding:
        if precision is Precision.ORACLE:
            return cls(torch.float64, None, None, torch.float64)
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        if precision is Precision.WORKING:
            return cls(work, None, None, out_dtype(q.dtype))
        score = out_dtype(q.dtype) if q.dtype.itemsize > 1 or q.dtype in FP8 else None
        tf32 = (
            q.is_cuda
            and q.dtype == torch.float32
            and torch.backends.cuda.matmul.fp32_precision == "tf32"
        )
        # What is narrower than q is multiplied in q's dtype.
        widened = v.dtype.itemsize < q.dtype.itemsize
        weight = q.dtype if widened else v.dtype
        if precision is Precision.STORED:  # kernels multiply tf32 three times, which is fp32
            score, tf32 = None, False
        eight = q.dtype in FP8
        return cls(work, score, weight, out_dtype(q.dtype), tf32, True, eight)

    def load(self, x: Tensor) -> Tensor:
        if x.dtype in FP8:  # torch converts eight bits to fp32 everywhere
            x = x.float()
        return self._tf32(x.to(self.work))

    def product(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        """Q [.., m, i] times K [.., i, n], times the scale, as it is rounded."""
        exact = x @ y * scale
        if not self.eight:
            return self.scores(exact)
        total, lost = sums_of_e4m3(x, y)
        least = lost * abs(scale)
        if self.score is None:  # errors of one sign, which cannot cancel in a row of two keys
            return exact + least
        error = self.scores(total * scale) - exact
        return exact + torch.where(error.abs() < least, least.copysign(error), error)

    def scores(self, x: Tensor) -> Tensor:
        # The error is relative: rounding after the scale is the same, and fp16 does not overflow.
        return self._tf32(x if self.score is None else x.to(self.score).to(self.work))

    def weights(self, p: Tensor) -> Tensor:
        if self.weight is None:
            return self._tf32(p)
        raised = RAISED if self.weight in FP8 else 1.0
        return self._tf32((p * raised).to(self.weight).to(self.work) / raised)

    def store(self, x: Tensor) -> Tensor:
        return x.to(self.out)

    def _tf32(self, x: Tensor) -> Tensor:
        if not self.tf32:
            return x
        # Veltkamp's split: keeps 11 bits of significand, and autograd can follow it.
        split = x * (2.0**13 + 1)
        return split - (split - x)


def sums_of_e4m3(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., m, i] times y [.., i, n] as Hopper sums it; what that loses, in the root mean square.

    Each cut loses 0 to 1 unit, whose root mean square is 1 / sqrt(3). If scores could err by less,
    a budget that few numbers set would be small by luck.
    """
    total, lost = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
    for i in range(0, x.shape[-1], ADDED):
        left, right = x[..., i : i + ADDED], y[..., i : i + ADDED, :]
        whole = total + left @ right
        # The Euclidean norm of the products is used in place of the largest one.
        size = (left.square() @ right.square()).sqrt()
        size = torch.stack([size, whole.abs(), total.abs().expand_as(size)]).amax(0)
        exponent = size.clamp_min(2.0**-100).view(torch.int32) & _EXPONENT
        unit = exponent.view(torch.float32) * KEPT
        total = (whole / unit).trunc() * unit
        lost = lost + unit.square() / 3
    return total, lost.sqrt()


_LOG2E = 1.0 / math.log(2.0)


def saved_softmax(
    scores: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    drop: Tensor | None,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """out with sinks, and lse as the forward makes it, through base 2; both with gradients.

    scores [b, h, m, n], v [b, kv heads, n, i], sinks [h]; out and lse are without them. drop,
    like scores: what dropout multiplies weights by.

    Method: FlashAttention's backward (Dao, arXiv 2205.14135, algorithm 4), in which a sink is a
    key of value 0.
    """
    out, lse = out.detach(), lse.detach()
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks.detach())
    apply: Any = _Saved.apply
    found: tuple[Tensor, Tensor] = apply(scores, v, sinks, out, lse, drop, rounding)
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
        drop: Tensor | None,
        rounding: Rounding,
    ) -> tuple[Tensor, Tensor]:
        lse = lse * _LOG2E * math.log(2.0)
        ctx.save_for_backward(scores, v, sinks, rounding.store(out).to(out.dtype), lse, drop)
        ctx.rounding = rounding
        return out.clone(), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        scores, v, sinks, out, lse, drop = ctx.saved_tensors
        b, heads, rows, keys = scores.shape
        kv_heads, width = v.shape[1], v.shape[-1]
        shared = heads * rows // kv_heads
        shift = torch.where(lse == -math.inf, 0.0, lse)
        p = torch.exp(scores - shift[..., None])
        grouped = dout.reshape(b, kv_heads, shared, width)
        weights, dp = ctx.rounding.weights(p), (grouped @ v.mT).reshape(scores.shape)
        if drop is not None:
            weights, dp = weights * drop, dp * drop
        dv = weights.reshape(b, kv_heads, shared, keys).mT @ grouped
        delta = (out * dout).sum(-1) - dlse
        ds = torch.where(p == 0, 0.0, p * (dp - delta[..., None]))
        dsinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - shift)
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return ds, dv, dsinks, None, None, None, None
