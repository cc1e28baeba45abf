"""An admitted call -> its Problem -> a launch, whose kernels are verified before the first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.device import Device, detect
from flexattn.errors import UnsupportedError
from flexattn.frontend.call import Call, identity
from flexattn.frontend.launch_cache import launch_cache
from flexattn.kernels.choose import options
from flexattn.kernels.choose.defaults import refused
from flexattn.kernels.printers.torch_printer import score_callable
from flexattn.mods.derivative import without_stops
from flexattn.problem import DTYPES, FP8, Problem, Shape, checks, kind_for, make_problem
from flexattn.problem.facts import layout_of, products_for, setting_of
from flexattn.problem.mask_lists import mask_class
from flexattn.records.untuned import note
from flexattn.reference.parts import SavedForward
from flexattn.runtime.backward import BackwardLaunch, Gradients
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import ForwardLaunch, Lists, Outputs, prepare_launch
from flexattn.verify.first_use import (
    Attended,
    LaunchedKernels,
    Way,
    accepted,
    beyond,
    judge_gradients,
    judge_rows,
)
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import ChosenKernels, borders_of, judge_backward, judge_forward


def verified_plan(make: Callable[[], Plan]) -> tuple[Plan, Outputs | None]:
    """The first plan whose kernels compute what plain torch does, and its outputs if it ran.

    make: plans again once kernels are known to be wrong. Raises BuildError where none is left.
    """
    while True:
        planned, found = make(), list[Outputs]()
        launch = planned.launch
        subject = LaunchedKernels.of(launch.choice, launch.merges)
        if accepted(subject, _ways(planned, found)):
            return planned, found[0] if found else None


def plan(call: Call, facts: tuple[Any, ...] | None = None) -> Plan:
    """Find the launch of a call in the launch cache, or prepare it.

    facts: those of the call, where they are known. Raises NoKernelError for mods that no
    kernel computes.
    """
    if call.beyond is not None:
        raise call.beyond
    lists, masked, sizes = None, "", None
    mask = call.block_mask
    if mask is not None:
        masked = mask_class(mask)  # finds the runs that its lists may have
        lists = Lists.of(mask)
        sizes = mask.BLOCK_SIZE, *[None if each is None else each.shape for each in lists]
    key = (
        call.facts() if facts is None else facts, call.scale > 0, identity(call.score),
        identity(call.mask), masked, sizes,
    )  # fmt: skip
    return Plan(launch_cache.prepared(key, lambda: _prepare(call, masked, lists)), call, lists)


def _prepare(call: Call, masked: str, lists: Lists | None) -> ForwardLaunch:
    """Make the launch; masked: the mask's class."""
    call = call._replace(score=call.score and without_stops(call.score))
    target, chosen = detect(call.q.device), call.options
    problem = _problem(call, masked, lists, target)
    if problem.structure.fp8 or problem.structure.kv_dtype:
        _check_narrow(problem, target, chosen)
    launch = prepare_launch(
        problem, target, call.q.device, dispatcher(), chosen, call.q, call.k, call.v, lists,
        call.descales,
    )  # fmt: skip
    # A tuner would tune the ordinary kernel.
    plain = not chosen.rules_off and chosen.tanh == "auto" and not chosen.batch_invariant
    plain = plain and not problem.structure.e4m3_weights
    if plain and call.dropout is None:
        note(problem, target, launch.choice.how, call.score, call.mask)
    return launch


def _problem(call: Call, masked: str, lists: Lists | None, target: Device) -> Problem:
    """The problem of a call. The key of its launch contains everything that is read here."""
    q, k, v = call.q, call.k, call.v
    chosen = call.options
    B, Hq, q_len, head_dim = q.shape
    _, Hkv, kv_len, head_dim_v = v.shape
    fp8 = q.dtype in FP8
    shape = Shape(B, Hq, Hkv, q_len, kv_len, head_dim, head_dim_v)
    sparsity = None
    if lists is not None:
        assert call.block_mask is not None
        sparsity = lists.sparsity(call.block_mask.BLOCK_SIZE, Hq // Hkv)
    kind = chosen.kind or kind_for(shape, target.num_sms, fp8, target.has_wgmma, sparsity)[0]
    # Splits of the keys do not drop, and of a length that fills a GPU they are not invariant.
    if call.dropout is not None or chosen.batch_invariant:
        kind = "prefill"
    return make_problem(
        kind,  # type: ignore[arg-type]
        checks.kernel_dtype(q.dtype),
        shape,
        call.score,
        call.mask,
        sparsity,
        layout_of(q, k, v),
        mask_class=masked,
        lse=call.statistics.lse,
        max_scores=call.statistics.max_scores,
        fp32_products=products_for(
            setting_of(q, chosen.fp32),
            kind,
            (head_dim, head_dim_v),
            target.capability,
            k.dtype != q.dtype,
        ),
        positive_scale=call.scale > 0,
        sinks="" if call.sinks is None else DTYPES[call.sinks.dtype],
        rules_off=chosen.all_rules_off,
        tanh=chosen.tanh,
        kv_dtype=(DTYPES | FP8)[k.dtype],
        dropout=call.dropout is not None,
        batch_invariant=chosen.batch_invariant,
        # Up to 128 columns exact weights are faster as well, by 1.2 to 1.3 (H200).
        fp8_weights=chosen.fp8_weights if max(head_dim, head_dim_v) > 128 else "exact",
    )


def _check_narrow(problem: Problem, target: Device, chosen: options.Options) -> None:
    """Raise UnsupportedError unless a template can serve eight bits, or keys narrower than q."""
    structure, why = problem.structure, ""
    if structure.fp8:
        rule = "float8_e4m3fn is multiplied by the prefill template for Hopper alone"
        do = "multiply q, k and v by their descales and pass them in bfloat16"
        if structure.kind == "decode" or chosen.language == "triton":
            why = "kernel_options ask for a Triton template"
        elif not chosen.overrides:
            why = refused(problem, target, "gluon")
    else:
        rule = (
            "keys and values that are narrower than the queries are converted by Triton's "
            "templates alone"
        )
        do = f"pass key and value in {structure.dtype}"
        if structure.kv_dtype in FP8.values() and 0 < target.capability < 89:
            why = f"Triton converts eight bits on sm_89 and newer, not on {target.arch}"
        elif chosen.language == "gluon":
            why = "kernel_options ask for the Gluon template"
    if why:
        raise UnsupportedError(f"{problem.describe()} on {target.name}: {why}", rule, do)


class Plan(NamedTuple):
    """A prepared launch with the tensors that this call gives it."""

    launch: ForwardLaunch
    call: Call
    lists: Lists | None

    def rest(self) -> tuple[Any, ...]:
        """The launch's arguments after the scale."""
        call = self.call
        score = call.score and without_stops(call.score)
        return self.launch.rest_of(self.lists, score, call.mask, call.dropout)

    def run(self, rest: tuple[Any, ...] | None = None) -> Outputs:
        """ForwardLaunch on the current stream; rest: what `rest` gave, where it was asked."""
        call, rest = self.call, self.rest() if rest is None else rest
        return self.launch.run(call.q, call.k, call.v, call.scale, rest, call.sinks, call.descales)


def _ways(planned: Plan, found: list[Outputs]) -> Iterator[Way]:
    """The call itself, whose outputs go into `found`, then a made-up one."""
    if not judged_apart(planned.call.q):
        with torch.no_grad():
            found.append(planned.run())
        yield partial(_judge, planned, found[0])
    yield partial(judge_forward, _chosen(planned))


def _judge(planned: Plan, found: Outputs) -> Verdict:
    call = planned.call
    # A call that is one node of a graph has no callable but its expression.
    score_mod = call.score_mod
    if score_mod is None:
        score_mod = score_callable(call.score)
    given = Attended(
        call.q, call.k, call.v, call.scale, score_mod, call.block_mask, call.sinks, call.descales,
        call.dropout, planned.launch.choice.problem.structure.e4m3_weights,
    )  # fmt: skip
    return judge_rows(given, found, borders_of(planned.launch.choice)[0])


def _chosen(planned: Plan) -> ChosenKernels:
    call, choice = planned.call, planned.launch.choice
    score = call.score and without_stops(call.score)
    return ChosenKernels(
        choice, call.q.device, call.scale, score, call.mask, planned.lists, call.dropout,
    )  # fmt: skip


def right_gradients(
    launch: BackwardLaunch,
    found: Gradients,
    call: Callable[[], tuple[SavedForward, ChosenKernels]],
) -> bool:
    """False if the first launch of a backward gave other gradients than plain torch.

    call: what was differentiated, as plain torch and as a made-up call take it. Those of captured
    tensors, which are sums over all of a call, are judged on the made-up one.
    """

    def ways() -> Iterator[Way]:
        saved, chosen = call()
        if not judged_apart(saved.q):
            borders = borders_of(launch.choice)
            yield lambda: _worse(judge_gradients(saved, found, borders), chosen)
        yield partial(judge_backward, chosen)

    return accepted(LaunchedKernels.of(launch.choice), ways())


def _worse(verdict: Verdict, chosen: ChosenKernels) -> Verdict:
    """The worse of a verdict and, if captured tensors get gradients, that of a made-up call."""
    if not chosen.choice.problem.structure.grads or beyond(verdict):
        return verdict
    return judge_backward(chosen)


def judged_apart(q: Tensor) -> bool:
    """True if a made-up call is checked in place of this one.

    Nothing is computed while a graph is captured. Processes of a group have other inputs each, and
    are to choose the same kernels.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    group: Any = torch.distributed
    return bool(group.is_available() and group.is_initialized() and group.get_world_size() > 1)
