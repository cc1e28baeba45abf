"""Autograd around a call: its forward is the planned launch, its backward plans one of its own."""

from __future__ import annotations

import weakref
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.block_mask.lazy import lazy_mask
from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call
from flexattn.frontend.gradients import (
    BackwardPlan,
    check_gradients,
    plan_backward,
    run_backward,
)
from flexattn.frontend.plan import Plan, plan
from flexattn.frontend.trained import Trained, with_tensors
from flexattn.frontend.verified import verified_plan
from flexattn.problem.runs import query_lists
from flexattn.runtime.launch import Outputs


def prepared(call: Call) -> tuple[Plan, Trained]:
    """What serves an admitted call whose results can be differentiated.

    In q, k, v, sinks and the floating tensors that score_mod captures, through out and lse.
    max_scores has no gradient. Raises UnsupportedError for what has no derivative, before it runs.
    """
    asked = check_gradients(call)
    # lse is saved for the backward; nothing else is, beside inputs and output.
    statistics = AuxRequest(lse=True, max_scores=call.statistics.max_scores)
    planned, _ = verified_plan(
        lambda: plan(call._replace(return_lse=False, return_aux=statistics))
    )
    return planned, Trained(call, planned, asked)


def attend(
    trained: Trained,
    mask: BlockMask | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> Outputs:
    """Serve a call that was prepared, inside of autograd."""
    apply: Any = _Attention.apply
    out, lse, maxima = apply(trained, mask, q, k, v, sinks, *trained.captured)
    return Outputs(out, lse if trained.lse else None, maxima)


class _Attention(torch.autograd.Function):
    """Of (trained, mask, q, k, v, sinks, *score_mod's tensors): out, lse and max_scores."""

    @staticmethod
    def forward(
        ctx: Any,
        trained: Trained,
        mask: BlockMask | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        asked = trained.asked
        outputs = trained.launch.run(q, k, v, asked.scale, trained.rest, sinks)
        assert outputs.lse is not None
        # Tensors are saved as autograd saves them, and by nobody else.
        tensors: tuple[Tensor | None, ...] = (*captured, *trained.masked)
        if mask is not None:
            tensors += query_lists(mask) if trained.saves_lists else (None,) * 4
            ctx.sizes = mask.BLOCK_SIZE, mask.seq_lengths
        ctx.save_for_backward(q, k, v, outputs.out, outputs.lse, sinks, *tensors)
        ctx.set_materialize_grads(False)
        if outputs.max_scores is not None:
            ctx.mark_non_differentiable(outputs.max_scores)
        ctx.asked, ctx.mask, ctx.captured = asked, mask, len(captured)
        ctx.trained = weakref.ref(trained)
        return outputs.out, outputs.lse, outputs.max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        """Gradients in the order of forward's arguments."""
        if dout is None and dlse is None:
            return (None,) * (6 + ctx.captured)
        wanted = tuple(ctx.needs_input_grad[2:])
        # Only where a graph of the gradients is asked for is there one to refuse.
        run = _Gradient.apply if torch.is_grad_enabled() else _gradients
        found = run(ctx, wanted, dout, dlse, *ctx.saved_tensors)
        return (None, None, *found)


class _Gradient(torch.autograd.Function):
    """The gradients of _Attention, whose own have no kernel."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "the gradients of flex_attention are differentiated again",
            "its backward has no backward",
            "use torch.nn.functional.scaled_dot_product_attention's math backend, or plain torch",
        )


def _gradients(
    call: Any,
    wanted: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    *saved: Any,
) -> tuple[Tensor | None, ...]:
    """Those of (q, k, v, sinks, *captured), where wanted; call: the ctx of _Attention."""
    q, k, v, out, lse, sinks, *others = saved
    asked, trained, mask = call.asked, call.trained(), call.mask
    if mask is not None:
        mask = _as_read(mask, others[-4:], call.sizes)
        del others[-4:]

    def planned(*tensors: Tensor) -> BackwardPlan:
        if trained is None:
            return plan_backward(with_tensors(asked, mask, others), *tensors)
        found: BackwardPlan = trained.plan_backward(mask, others, *tensors)
        return found

    summed = [others[slot] for slot in asked.slots]
    found = run_backward(
        planned, (q, k, v), out, lse, (dout, dlse), asked.scale, summed,
        partial(with_tensors, asked, mask, others), sinks=sinks,
    )  # fmt: skip
    dsinks = _of_sinks(sinks, lse, found.delta) if wanted[3] else None
    of_slots = dict(zip(asked.slots, found.captured, strict=True))
    given = (found.dq, found.dk, found.dv, dsinks, *map(of_slots.get, range(call.captured)))
    return tuple(x if want else None for x, want in zip(given, wanted, strict=True))


def _as_read(mask: BlockMask, saved: list[Tensor | None], sizes: tuple[Any, Any]) -> BlockMask:
    """A block mask as its forward read it: another where it has other lists or sizes by now.

    saved: its lists by query, as autograd gives them back, or none of them. sizes: of its blocks,
    and its lengths.
    """
    lists = query_lists(mask)
    alike = (mask.BLOCK_SIZE, mask.seq_lengths) == sizes
    if alike and (all(map(is_, saved, lists)) or all(map(_alike, saved, lists))):
        return mask
    given = [x for x in (lists if saved[0] is None else saved) if x is not None]
    block, lengths = sizes
    return lazy_mask(tuple(given), block, mask.mask_mod, lengths)


def _alike(saved: Tensor | None, now: Tensor | None) -> bool:
    """Whether nothing was saved, or what is there now: a checkpoint gives an alias of it."""
    if saved is None or now is None or saved is now:
        return saved is None or saved is now
    same = saved.data_ptr() == now.data_ptr() and saved.shape == now.shape
    return same and saved._version == now._version


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink weighs exp(sink - lse) of its row and has no value: that times -delta, summed."""
    # lse is -inf where the sink is, beside no key: both are no number's difference.
    weight = torch.exp(sinks.float()[:, None] - lse.clamp(min=torch.finfo(lse.dtype).min))
    return (weight * delta).sum((0, 2), dtype=torch.float64).neg().to(sinks.dtype)
