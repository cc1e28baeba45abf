"""Calls whose kernels are verified before their first result is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.plan import Plan
from flexattn.kernels.printers.torch_printer import score_callable
from flexattn.mods.derivative import without_stops
from flexattn.reference.parts import SavedForward
from flexattn.runtime.backward import BackwardLaunch, Gradients
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Launch, Outputs
from flexattn.verify.first_use import LaunchedKernels, accepted, due
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import ChosenKernels, borders_of, judge_backward, judge_forward
from flexattn.verify.samples import Attended, beyond, judge_gradients, judge_rows


def verified_plan(make: Callable[[], Plan]) -> tuple[Plan, Outputs | None]:
    """The first plan whose kernels compute what plain torch does, and its outputs if it ran.

    make: plans again once kernels are known to be wrong. Raises BuildError where none is left.
    """
    while True:
        planned = make()
        subject = _subject(planned.launch)
        if not due(subject):
            return planned, None
        call, found = planned.call, None
        ways: list[Callable[[], Verdict]] = [partial(judge_forward, _chosen(planned))]
        if not _apart(call.q):
            with torch.no_grad():
                found = planned.run()
            ways.insert(0, partial(_judge, planned, found))
        if accepted(subject, *ways):
            return planned, found


def wrong_gradients(
    launch: BackwardLaunch,
    found: Gradients,
    call: Callable[[], tuple[SavedForward, ChosenKernels]],
) -> bool:
    """Whether the first launch of a backward gave other gradients than plain torch.

    call: what was differentiated, as plain torch and as a made-up call take it. Those of captured
    tensors, which are sums over all of a call, are judged on the made-up one.
    """
    subject = LaunchedKernels.of(launch.choice)
    if not due(subject):
        return False
    saved, chosen = call()
    ways: list[Callable[[], Verdict]] = [partial(judge_backward, chosen)]
    if not _apart(saved.q):
        borders = borders_of(launch.choice)
        ways.insert(0, lambda: _worse(judge_gradients(saved, found, borders), chosen))
    return not accepted(subject, *ways)


def _worse(verdict: Verdict, chosen: ChosenKernels) -> Verdict:
    """The worse of a verdict and, if captured tensors get gradients, that of a made-up call."""
    if not chosen.choice.problem.structure.grads or beyond(verdict):
        return verdict
    return judge_backward(chosen)


def _subject(launch: Launch) -> LaunchedKernels:
    return LaunchedKernels.of(launch.choice, launch.combine is not None)


def _apart(q: Tensor) -> bool:
    """Whether a made-up call is checked in place of this one.

    Nothing is computed while a graph is captured. Processes of a group have other inputs each, and
    are to choose the same kernels.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    group: Any = torch.distributed
    return bool(group.is_available() and group.is_initialized() and group.get_world_size() > 1)


def _judge(planned: Plan, found: Outputs) -> Verdict:
    call = planned.call
    # A call that is one node of a graph has no callable but its expression.
    score_mod = call.score_mod
    if score_mod is None:
        score_mod = score_callable(call.score)
    given = Attended(
        call.q, call.k, call.v, call.scale, score_mod, call.block_mask, call.sinks, call.descales,
        call.dropout,
    )  # fmt: skip
    return judge_rows(given, found, borders_of(planned.launch.choice)[0])


def _chosen(planned: Plan) -> ChosenKernels:
    call, problem = planned.call, planned.launch.problem
    target, index = planned.launch.choice.device, planned.launch.gpu
    choice, kernel, combine = dispatcher().kernels(problem, target, index, call.options)
    score = call.score and without_stops(call.score)
    return ChosenKernels(
        choice, kernel, combine, call.q.device, call.scale, score, call.mask, planned.lists,
        call.dropout,
    )  # fmt: skip
