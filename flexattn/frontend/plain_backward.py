"""Gradients of a call in plain torch, by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.mods.signatures import ScoreMod
from flexattn.problem.dropout import Dropout
from flexattn.reference import attention
from flexattn.runtime.backward import like


def by_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float,
    learned: Sequence[Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    into: Sequence[Tensor] | None = None,
    dropout: Dropout | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v, and of the learned tensors, which score_mod captures and which
    require grad.

    grads: of the output and of lse, None where nothing depends on one. into: where the first three
    go; None where they are allocated.
    """
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        found = attention(
            *inputs, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
            dropout=dropout,
        )  # fmt: skip
        pairs = [
            (x, g) for x, g in zip((found.out, found.lse), grads, strict=True) if g is not None
        ]
        leaves = [*inputs, *learned]
        given = torch.autograd.grad(
            [x for x, _ in pairs], leaves, [g.to(x.dtype) for x, g in pairs], allow_unused=True
        )
    whole = [zeros_of(x) if g is None else g for x, g in zip(leaves, given, strict=True)]
    places = map(like, inputs) if into is None else into
    dq, dk, dv = (place.copy_(g) for place, g in zip(places, whole, strict=False))
    return dq, dk, dv, whole[3:]


def zeros_of(x: Tensor) -> Tensor:
    """Zeros of a tensor's shape and dtype, contiguous."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
