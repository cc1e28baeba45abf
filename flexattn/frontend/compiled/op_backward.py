"""flexattn::attend_backward: the op that stands for a call's gradients in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lists import transposed
from flexattn.frontend.attention import route_of
from flexattn.frontend.call import Call
from flexattn.frontend.compiled.op import library, mask_of, remember_by_key, score_of, transforming
from flexattn.frontend.compiled.spec import Spec, parsed
from flexattn.frontend.gradients import (
    AskedGradients,
    by_autograd,
    plan_backward,
    run_backward,
    zeros_of,
)
from flexattn.problem import checks
from flexattn.runtime.backward import like
from flexattn.runtime.layout import dense_strides

BACKWARD_OP_NAME = "flexattn::attend_backward"
PACKED_OP_NAME = "flexattn::attend_backward_packed"
BY_KEY_OP_NAME = "flexattn::lists_by_key"
_TAKES = (
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, "
    "Tensor? dlse, Tensor[] lists, Tensor[] by_key, Tensor[] score, Tensor[] mask, "
    "SymInt[] score_integers, SymInt[] mask_integers, str spec, float scale"
)
library.define(f"attend_backward({_TAKES}) -> (Tensor, Tensor, Tensor, Tensor[])")
library.define(f"attend_backward_packed({_TAKES}, int[] places) -> (Tensor, Tensor[])")
library.define("lists_by_key(Tensor counts, Tensor indices) -> (Tensor, Tensor)")

_Found = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    lists: Sequence[Tensor],
    by_key: Sequence[Tensor],
    score: Sequence[Tensor],
    mask: Sequence[Tensor],
    score_integers: Sequence[int],
    mask_integers: Sequence[int],
    spec: str,
    scale: float,
    into: Sequence[Tensor] | None = None,
) -> _Found:
    """Gradients of q, k, v and of those tensors in score that the spec names.

    out, lse: of `attend` (lse in natural log). dout, dlse: their gradients, None where nothing
    depends on one. lists, by_key: of blocks, as a BlockMask has them by query and by key; no
    by_key where they are to be made here. into: where the first three go; None where they are
    allocated.
    """
    said = parsed(spec)
    scale = checks.check_scale(scale, q.shape[3])
    wanted = [score[i] for i in said.grads]
    if not out.numel() or not k.numel():
        dq, dk, dv = (x.zero_() for x in (map(like, (q, k, v)) if into is None else into))
        return dq, dk, dv, list(map(zeros_of, wanted))
    with torch.no_grad(), transforming():
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        leaves = list(score)
        for i in said.grads:
            leaves[i] = score[i].detach().to(q.device).resolve_neg().requires_grad_()
        bound, score_mod = score_of(said, q, leaves, score_integers)
        kept, block_mask = mask_of(said, q, k, lists, mask, mask_integers)
        call = Call(q, k, v, score_mod, block_mask, scale, score=bound, mask=kept)
        grads = [leaves[i] for i in said.grads]
        if route_of(call)[0] == "reference":
            given = call.q, call.k, call.v, score_mod, block_mask, scale
            found = by_autograd(*given, grads, (dout, dlse), into)
        else:
            if block_mask is not None:
                remember_by_key(block_mask, lists, by_key)
            found = _by_kernel(call, said, block_mask, grads, out, lse, dout, dlse, into)
    captured = [_as(x, own) for x, own in zip(found[3], wanted, strict=True)]
    return (*found[:3], captured)


def attend_backward_packed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Any]:
    """As `attend_backward`, the gradients of q, k and v side by side in one tensor [elements].

    The last of rest, places: of each its offset, and its strides of batch, head and row, in
    elements; they cover the tensor.
    """
    places = rest[-1]
    packed = _packed(q, k, v)
    into = [
        packed.as_strided(x.shape, (*places[i + 1 : i + 4], 1), places[i])
        for i, x in zip(range(0, 12, 4), (q, k, v), strict=True)
    ]
    given: tuple[Any, ...] = (q, k, v, *rest[:-1], into)
    return packed, attend_backward(*given)[3]


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.numel() + k.numel() + v.numel())


def _by_kernel(
    call: Call, said: Spec, block_mask: BlockMask | None, grads: Sequence[Tensor], out: Tensor,
    lse: Tensor, dout: Tensor | None, dlse: Tensor | None, into: Sequence[Tensor] | None,
) -> _Found:  # fmt: skip
    tensors = () if call.score is None else call.score.tensors
    # A number that changes may have left a tensor out of the expression.
    slots = tuple(s for s, x in enumerate(tensors) if any(x is each for each in grads))
    asked = AskedGradients(call.score, call.mask, block_mask, call.scale, said.chosen, slots)
    learned = [tensors[slot] for slot in slots]
    planned = partial(plan_backward, asked, into=into)
    inputs = call.q, call.k, call.v
    found = run_backward(
        planned, inputs, out, lse, (dout, dlse), call.scale, learned, lambda: asked, into
    )
    summed = {id(tensors[s]): x for s, x in zip(slots, found.captured, strict=True)}
    captured = [summed[id(x)] if id(x) in summed else zeros_of(x) for x in grads]
    return found.dq, found.dk, found.dv, captured


def _as(found: Tensor, own: Tensor) -> Tensor:
    """A gradient where its tensor lives, contiguous."""
    return found.to(own.device, own.dtype).contiguous()


def _fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Any, dlse: Any, lists: Any,
    by_key: Any, score: Sequence[Tensor], mask: Any, score_integers: Any, mask_integers: Any,
    spec: str, scale: float,
) -> _Found:  # fmt: skip
    dq, dk, dv = (
        x.new_empty_strided(x.shape, dense_strides(x.stride(), tuple(x.shape))) for x in (q, k, v)
    )
    return dq, dk, dv, _fake_captured(score, spec)


def _fake_packed(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Any, dlse: Any, lists: Any,
    by_key: Any, score: Sequence[Tensor], mask: Any, score_integers: Any, mask_integers: Any,
    spec: str, scale: float, places: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    return _packed(q, k, v), _fake_captured(score, spec)


def _fake_by_key(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = indices.shape
    return counts.new_empty([*batch, columns]), indices.new_empty([*batch, columns, rows])


def _fake_captured(score: Sequence[Tensor], spec: str) -> list[Tensor]:
    return [score[i].new_empty(score[i].shape) for i in parsed(spec).grads]


for _name, _run, _shapes in (
    (BACKWARD_OP_NAME, attend_backward, _fake),
    (PACKED_OP_NAME, attend_backward_packed, _fake_packed),
    (BY_KEY_OP_NAME, transposed, _fake_by_key),
):
    library.impl(_name.split("::")[1], _run, "CompositeExplicitAutograd")
    torch.library.register_fake(_name, _shapes, lib=library)
