"""What serves a call with gradients again: its forward's launch, and the plan of its backward."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.frontend.call import Call
from flexattn.frontend.gradients import AskedGradients, BackwardPlan, plan_backward
from flexattn.frontend.plan import Plan
from flexattn.mods.derivative import derivatives
from flexattn.problem.facts import facts_of
from flexattn.problem.fp32_products import setting_of
from flexattn.problem.mask_class import UNKNOWN, known_class
from flexattn.problem.runs import query_lists, unwritten, versions
from flexattn.records.store import generation
from flexattn.settings import current


class Trained:
    """A call with gradients: its forward, prepared, and the last backward of such a call.

    launch, rest: of the forward. asked: what the backward keeps of the call, without tensors and
    the block mask, which is not kept alive. captured, masked: the mods' tensors, the second with
    the seed of dropout behind them; learns: which of the first require grad. lse: whether the
    caller asked for it. saves_lists: whether autograd can save the block mask's lists: those that
    were made in inference mode do not tell when they are written to.
    """

    __slots__ = (
        "__weakref__", "_last", "_summed", "asked", "captured", "launch", "learns", "lse",
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
        self._last: _Last | None = None

    def holds(self) -> bool:
        """Whether another such call, of the same mods, is checked and differentiated alike."""
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
        last, parts = self._last, _parts(mask)
        if last is not None and last.holds(facts, others, parts, decided):
            return last.plan
        found = plan_backward(with_tensors(self.asked, mask, others), *tensors)
        lists = [each for each in parts[:4] if each is not None]
        # What was made in inference mode does not tell when it is written to.
        known = mask is None or known_class(mask) not in (None, UNKNOWN)
        if known and not any(each.is_inference() for each in lists):
            self._last = _Last(found, facts, others, parts, versions(lists), decided)
        return found


def with_tensors(
    asked: AskedGradients, mask: BlockMask | None, others: list[Tensor]
) -> AskedGradients:
    """What a backward keeps of its call, with the block mask, the mods' tensors and the seed."""
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


class _Last(NamedTuple):
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
        same = same and all(map(is_, others, self.others)) and all(map(is_, parts, self.parts))
        return same and unwritten(self.written)


def _parts(mask: BlockMask | None) -> tuple[Any, ...]:
    if mask is None:
        return ()
    return (*query_lists(mask), mask.BLOCK_SIZE, mask.seq_lengths)
