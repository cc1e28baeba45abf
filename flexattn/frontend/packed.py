"""Calls of packed sequences on Hopper's kernels, which read cu_seqlens where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexattn.device import detect
from flexattn.errors import FlexAttnError, WrongKernelError
from flexattn.frontend.autograd import of_sinks
from flexattn.frontend.call import PLAIN, bind_on, functorch, identity, is_traced
from flexattn.frontend.gradients import AskedGradients, BackwardPlan, run_backward
from flexattn.frontend.launch_cache import launch_cache
from flexattn.frontend.plan import judged_apart
from flexattn.kernels.choose.options import NONE
from flexattn.mods import Bound
from flexattn.mods.derivative import without_stops
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem.facts import facts_of
from flexattn.runtime.launch import Outputs
from flexattn.runtime.ragged import (
    PackedBackward,
    PackedLaunch,
    packed_backward_problem,
    packed_problem,
    prepare_packed,
)
from flexattn.settings import current
from flexattn.verify.first_use import Attended, LaunchedKernels, accepted, judge_rows
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import borders_of

_DTYPES = (torch.bfloat16, torch.float16)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float,
    sinks: Tensor | None,
    lse: bool,
    as_documents: Callable[[Tensor, Tensor, Tensor], Attended],
) -> Outputs | None:
    """out [total_q, Hq, Dv], and lse [total_q, Hq] where asked for; None if it does not serve.

    Mods see the number of a sequence, and positions from its first query and key. as_documents:
    the same call with a document mask, by which a kernel's first launch is judged.
    """
    if not _is_plain(q, k, v, *cu_seqlens, sinks):
        return None
    every = (q, k, v) if sinks is None else (q, k, v, sinks)
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in every)
    try:
        score, mask = (
            None if fn is None else bind_on(fn, kind, q)[0]
            for fn, kind in ((score_mod, "score"), (mask_mod, "mask"))
        )
    except FlexAttnError:  # the call with a document mask says what is wrong
        return None
    learned = score is not None and any(x.requires_grad for x in score.tensors)
    if learned and torch.is_grad_enabled():
        return None
    cu_q, cu_k = (x.to(torch.int32).contiguous() for x in cu_seqlens)
    sequences, asked = len(cu_q) - 1, score
    if graded and (
        torch.are_deterministic_algorithms_enabled()
        or _backward(q, k, v, sequences, score, mask) is None
    ):
        return None
    score = None if score is None else without_stops(score)
    while True:
        launch = _launch(q, k, v, sequences, score, mask, scale, sinks, lse or graded)
        if launch is None:
            return None
        rest = launch.rest_of(None, score, mask)
        found = launch.run(q, k, v, cu_q, cu_k, scale, rest, sinks)
        subject = replace(LaunchedKernels.of(launch.choice), sources=launch.kernel_sources)
        ways = (
            ()
            if judged_apart(q)
            else (partial(_judge, launch, found, partial(as_documents, q, k, v)),)
        )
        if accepted(subject, ways):
            break
    if not graded:
        return found
    call = GradedPack(asked, mask, scale, as_documents)
    apply: Any = _Attention.apply
    out, sums = apply(call, found, q, k, v, sinks, cu_q, cu_k)
    return Outputs(out, sums if lse else None, None)


class GradedPack(NamedTuple):
    """The mods and the scale of a call with gradients, and the same call with a document mask."""

    score: Bound | None
    mask: Bound | None
    scale: float
    as_documents: Callable[[Tensor, Tensor, Tensor], Attended]

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the mods read."""
        return tuple(x for mod in (self.score, self.mask) if mod is not None for x in mod.tensors)

    def asked(self, q: Tensor, k: Tensor, v: Tensor, judged: bool) -> AskedGradients:
        """The call with a document mask; its scale alone where nothing is judged by it."""
        if not judged:
            return AskedGradients(None, None, None, self.scale, NONE, ())
        call = self.as_documents(q, k, v)
        score = call.score_mod and bind_on(call.score_mod, "score", q)[0]
        return AskedGradients(score, None, call.block_mask, self.scale, NONE, ())


class _Attention(torch.autograd.Function):
    """(out, lse) of (call, what its forward gave, q, k, v, sinks, cu_seqlens of both)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: GradedPack,
        found: Outputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert found.lse is not None
        ctx.save_for_backward(q, k, v, found.out, found.lse, sinks, *cu_seqlens, *call.tensors())
        ctx.set_materialize_grads(False)
        ctx.call = call
        return found.out, found.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        """Gradients in the order of forward's arguments."""
        wanted = ctx.needs_input_grad[2:6]
        if dout is None and dlse is None:
            return (None,) * 8
        call: GradedPack = ctx.call
        q, k, v, out, lse, sinks, cu_q, cu_k = ctx.saved_tensors[:8]
        dout = torch.zeros_like(out) if dout is None else dout

        def planned(*tensors: Tensor) -> BackwardPlan:
            chosen = _backward(q, k, v, len(cu_q) - 1, call.score, call.mask)
            if chosen is None:
                raise WrongKernelError(
                    "no kernel of Hopper's backward is right for these packed sequences",
                    "each gave other gradients than plain torch",
                    "FLEXATTN_VERIFY=off checks nothing",
                )
            facts = (*map(facts_of, tensors), len(cu_q))
            key = ("packed backward", chosen.choice.source.hash, *facts)
            launch = launch_cache.prepared(key, lambda: chosen.prepare(*tensors))
            return BackwardPlan(launch, (cu_q, cu_k, *launch.rest_of(None, call.score, call.mask)))

        served = _backward(q, k, v, len(cu_q) - 1, call.score, call.mask) is not None
        judged = not (served and judged_apart(q))
        sums = lse.T[None].contiguous()
        found = run_backward(
            planned, (_heads(q), _heads(k), _heads(v)), _heads(out), sums,
            (_heads(dout), None if dlse is None else dlse.T[None]), call.scale, (),
            partial(call.asked, q, k, v, judged), sinks=sinks,
        )  # fmt: skip
        dsinks = of_sinks(sinks, sums, found.delta) if wanted[3] else None
        grads = (*(x[0].transpose(0, 1) for x in found[:3]), dsinks)
        given = (x if want else None for x, want in zip(grads, wanted, strict=True))
        return (None, None, *given, None, None)


def _heads(x: Tensor) -> Tensor:
    """Rows [length, heads, D] as one batch [1, heads, length, D], as dense as they are."""
    return x[None].transpose(1, 2)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, sequences: int, score: Bound | None, mask: Bound | None
) -> PackedBackward | None:
    """The kernel of the gradients, found or chosen; None where none serves."""

    def prepared() -> tuple[PackedBackward | None]:
        problem = packed_backward_problem(q, k, v, sequences, score, mask)
        return (PackedBackward.of(problem, detect(q.device), q.device),)

    key = (
        "packed gradients", *map(facts_of, (q, k, v)), sequences, identity(score), identity(mask),
    )  # fmt: skip
    return launch_cache.prepared(key, prepared)[0]


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: int,
    score: Bound | None,
    mask: Bound | None,
    scale: float,
    sinks: Tensor | None,
    lse: bool,
) -> PackedLaunch | None:
    """The launch by all that decides it, found or prepared; None where no kernel serves."""

    def prepared() -> tuple[PackedLaunch | None]:
        problem = packed_problem(
            q, k, v, sequences, score, mask, lse=lse, positive_scale=scale > 0,
            sinks=sinks is not None,
        )  # fmt: skip
        return (prepare_packed(problem, detect(q.device), q.device, q, k, v),)

    key = (
        "packed", facts_of(q), facts_of(k), facts_of(v), sequences, identity(score),
        identity(mask), scale > 0, sinks is not None, lse,
    )  # fmt: skip
    return launch_cache.prepared(key, prepared)[0]


def _is_plain(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """True of tensors on one Hopper GPU that nothing traces or transforms."""
    every, settings = (q, k, v, *others), current()
    given = [x for x in every if x is not None]
    sinks = others[-1]
    return (
        q.is_cuda
        and PLAIN.issuperset(map(type, every))
        and q.dtype in _DTYPES
        and q.dtype is k.dtype is v.dtype
        and k.shape[:2] == v.shape[:2]
        and q.shape[2] == k.shape[2]
        and 0 < k.shape[1] <= q.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and min(q.numel(), k.numel(), v.numel()) > 0
        and all(x.device == q.device and not x.is_neg() for x in given)
        and (sinks is None or _are_sinks(sinks, q))
        and not (settings.check or settings.batch_invariant)
        and not torch.is_autocast_enabled("cuda")
        and forward_ad._current_level < 0
        and functorch.peek_interpreter_stack() is None
        and not is_traced()
        and detect(q.device).has_wgmma
    )


def _are_sinks(sinks: Tensor, q: Tensor) -> bool:
    """True of sinks as the kernel reads them."""
    return sinks.dtype is torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous()


def _judge(launch: PackedLaunch, found: Outputs, as_documents: Callable[[], Attended]) -> Verdict:
    sums: Any = None if found.lse is None else found.lse.T[None]
    got = Outputs(found.out.transpose(0, 1)[None], sums, None)
    return judge_rows(as_documents(), got, borders_of(launch.choice)[0])
