"""Attention sinks: a logit of each head that joins the softmax's sum and has no value."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention without sinks [Hq] as they are with them.

    out [B, Hq, L, Ev] keeps its dtype; lse [B, Hq, L] is in natural log. A row without a key,
    whose lse is -inf, keeps its zeros and gets its sink as lse. Exact but for rounding, and
    differentiable in all three: exp(lse) / (exp(lse) + exp(sink)) is sigmoid(lse - sink).
    """
    sink = sinks.to(lse.dtype)[:, None]
    empty = lse == -math.inf
    # A finite number where there is no key: the gradient of what `where` drops would be NaN.
    some = torch.where(empty, 0.0, lse)
    keep = torch.sigmoid(some - sink)
    total = torch.where(empty, sink, torch.logaddexp(some, sink))
    return (out * keep[..., None]).to(out.dtype), total
