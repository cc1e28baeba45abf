"""Autograd around a call: its forward is the planned launch, its backward plans one of its own."""

from __future__ import annotations

import weakref
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from flexattn.block_mask.lists import lazy_mask
from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call
from flexattn.frontend.gradients import (
    AskedGradients,
    BackwardPlan,
    check_gradients,
    plan_backward,
    run_backward,
)
from flexattn.frontend.launch_cache import with_lists_of
from flexattn.frontend.plan import Plan, plan, verified_plan
from flexattn.mods.derivative import derivatives
from flexattn.problem.facts import facts_of, setting_of
from flexattn.problem.mask_lists import (
    UNKNOWN,
    known_class,
    list_form,
    query_lists,
    unwritten,
    versions,
)
from flexattn.records.store import generation
from flexattn.runtime.launch import Outputs
from flexattn.settings import current


def prepared(call: Call) -> tuple[Plan, GradCall]:
    """The plan, and the gradients' part, of an admitted call whose results can be differentiated.

    In q, k, v, sinks and the floating tensors that score_mod captures, through out and lse.
    max_scores has no gradient. Raises UnsupportedError for what has no derivative, before it runs.
    """
    asked = check_gradients(call)
    # lse is saved for the backward; nothing else is, beside inputs and output.
    statistics = AuxRequest(lse=True, max_scores=call.statistics.max_scores)
    planned, _ = verified_plan(
        lambda: plan(call._replace(return_lse=False, return_aux=statistics))
    )
    return planned, GradCall(call, planned, asked)


class GradCall:
    """A call with gradients: its forward, prepared, and the backward of the last such call.

    launch, rest: of the forward. asked: what the backward keeps of the call, without tensors and
    the block mask, which is not kept alive. captured, masked: the mods' tensors, the second with
    the seed of dropout behind them; learns: which of the first require grad. lse: whether the
    caller asked for it. saves_lists: whether autograd can save the block mask's lists: those that
    were made in inference mode do not tell when they are written to.
    """

    __slots__ = (
        "__weakref__", "_backward", "_summed", "asked", "captured", "launch", "learns", "lse",
        "masked", "rest", "saves_lists",
    )  # fmt: skip

    def __init__(self, call: Call, planned: Plan, asked: AskedGradients) -> None:
        self.launch, self.rest = planned.launch, planned.rest()
        self.captured = () if call.score is None else call.score.tensors
        self.masked = () if call.mask is None else call.mask.tensors
        dropout = asked.dropout
        if dropout is not None and dropout.seed is not None:
            self.masked += (dropout.seed,)
            dropout = dropout._replace(seed=None)
        self.learns = [each.requires_grad for each in self.captured]
        self.lse = call.statistics.lse
        lists = () if call.block_mask is None else query_lists(call.block_mask)
        self.saves_lists = not any(x is not None and x.is_inference() for x in lists)
        score, mask = (each and each._replace(tensors=()) for each in (asked.score, asked.mask))
        self.asked = asked._replace(score=score, mask=mask, block_mask=None, dropout=dropout)
        self._summed = score is not None and bool(
            derivatives(score.mod, asked.slots).summed(asked.slots)
        )
        self._backward: _Backward | None = None

    def attend(
        self, mask: BlockMask | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Outputs:
        """Serve such a call, inside of autograd."""
        apply: Any = _Attention.apply
        out, lse, maxima = apply(self, mask, q, k, v, sinks, *self.captured)
        return Outputs(out, lse if self.lse else None, maxima)

    def holds(self) -> bool:
        """True if another such call, of the same mods, is checked and differentiated alike."""
        if self._summed and torch.are_deterministic_algorithms_enabled():
            return False
        return [each.requires_grad for each in self.captured] == self.learns

    def plan_backward(
        self,
        mask: BlockMask | None,
        others: list[Tensor],
        *tensors: Tensor,
    ) -> BackwardPlan:
        """The plan of a backward; the last one's where all that it rests on is still the same.

        others: what the mods captured, as autograd gives it back. tensors: q, k, v, out and dout.
        """
        facts = [*map(facts_of, tensors), *map(facts_of, others)]
        decided = (
            setting_of(tensors[0], self.asked.options.fp32),
            torch.are_deterministic_algorithms_enabled(), current(), generation(),
        )  # fmt: skip
        last, parts = self._backward, _parts(mask)
        if last is not None and last.holds(facts, others, parts, decided):
            if mask is None or list_form(mask) is None:
                return last.plan
            launch, given = last.plan.launch, with_tensors(self.asked, mask, others)
            rest = launch.rest_of(given.lists(), given.score, given.mask, given.dropout)
            return BackwardPlan(launch, rest)
        found = plan_backward(with_tensors(self.asked, mask, others), *tensors)
        lists = [each for each in parts[:4] if isinstance(each, Tensor)]
        # What was made in inference mode does not tell when it is written to.
        known = mask is None or known_class(mask) not in (None, UNKNOWN)
        if known and not any(each.is_inference() for each in lists):
            self._backward = _Backward(found, facts, others, parts, versions(lists), decided)
        return found


def with_tensors(
    asked: AskedGradients, mask: BlockMask | None, others: list[Tensor]
) -> AskedGradients:
    """The data that a backward keeps of its call, with block mask, mods' tensors and seed."""
    count = 0 if asked.score is None else len(asked.score.mod.buffers)
    score, masked, dropout = tuple(others[:count]), tuple(others[count:]), asked.dropout
    if dropout is not None:
        dropout, masked = dropout._replace(seed=masked[-1]), masked[:-1]
    return asked._replace(
        score=asked.score and asked.score._replace(tensors=score),
        mask=asked.mask and asked.mask._replace(tensors=masked),
        block_mask=mask,
        dropout=dropout,
    )


class _Backward(NamedTuple):
    """A plan, and what tells that it serves: of tensors, of the mask's lists, of the process."""

    plan: BackwardPlan
    facts: list[Any]
    others: list[Tensor]
    parts: tuple[Any, ...]
    written: list[Any]
    decided: tuple[Any, ...]

    def holds(
        self,
        facts: list[Any],
        others: list[Tensor],
        parts: tuple[Any, ...],
        decided: tuple[Any, ...],
    ) -> bool:
        same = facts == self.facts and decided == self.decided and len(parts) == len(self.parts)
        same = same and all(map(is_, others, self.others))
        if self.written:
            return same and all(map(is_, parts, self.parts)) and unwritten(self.written)
        return same and parts == self.parts


def _parts(mask: BlockMask | None) -> tuple[Any, ...]:
    if mask is None:
        return ()
    form = list_form(mask)
    if form is not None:
        return form
    return (*query_lists(mask), mask.BLOCK_SIZE, mask.seq_lengths)


class _Attention(torch.autograd.Function):
    """(out, lse, max_scores) of (grads, mask, q, k, v, sinks, *score_mod's tensors)."""

    @staticmethod
    def forward(
        ctx: Any,
        grads: GradCall,
        mask: BlockMask | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        asked = grads.asked
        rest = grads.rest if list_form(mask) is None else with_lists_of(mask, grads.rest)
        outputs = grads.launch.run(q, k, v, asked.scale, rest, sinks)
        assert outputs.lse is not None
        # Tensors are saved as autograd saves them, and by nobody else.
        tensors: tuple[Tensor | None, ...] = (*captured, *grads.masked)
        if mask is not None:
            tensors += query_lists(mask) if grads.saves_lists else (None,) * 4
            ctx.sizes = mask.BLOCK_SIZE, mask.seq_lengths
        ctx.save_for_backward(q, k, v, outputs.out, outputs.lse, sinks, *tensors)
        ctx.set_materialize_grads(False)
        if outputs.max_scores is not None:
            ctx.mark_non_differentiable(outputs.max_scores)
        ctx.asked, ctx.mask, ctx.captured = asked, mask, len(captured)
        ctx.grads = weakref.ref(grads)
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
    """The gradients of (q, k, v, sinks, *captured), where wanted; call: the ctx of _Attention."""
    q, k, v, out, lse, sinks, *others = saved
    asked, grads, mask = call.asked, call.grads(), call.mask
    if mask is not None:
        mask = _as_read(mask, others[-4:], call.sizes)
        del others[-4:]

    def planned(*tensors: Tensor) -> BackwardPlan:
        if grads is None:
            return plan_backward(with_tensors(asked, mask, others), *tensors)
        found: BackwardPlan = grads.plan_backward(mask, others, *tensors)
        return found

    summed = [others[slot] for slot in asked.slots]
    found = run_backward(
        planned, (q, k, v), out, lse, (dout, dlse), asked.scale, summed,
        partial(with_tensors, asked, mask, others), sinks=sinks,
    )  # fmt: skip
    dsinks = of_sinks(sinks, lse, found.delta) if wanted[3] else None
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
    """True if nothing was saved, or what is there now: a checkpoint gives an alias of it."""
    if saved is None or now is None or saved is now:
        return saved is None or saved is now
    same = saved.data_ptr() == now.data_ptr() and saved.shape == now.shape
    return same and saved._version == now._version


def of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink weighs exp(sink - lse) of its row and has no value: that times -delta, summed."""
    # lse is -inf where the sink is, beside no key: both are no number's difference.
    weight = torch.exp(sinks.float()[:, None] - lse.clamp(min=torch.finfo(lse.dtype).min))
    return (weight * delta).sum((0, 2), dtype=torch.float64).neg().to(sinks.dtype)
