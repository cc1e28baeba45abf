"""Calls of packed sequences on Hopper's forward, which reads cu_seqlens where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexattn.device import detect
from flexattn.errors import FlexAttnError
from flexattn.frontend.call import PLAIN, bind_on, functorch, identity, is_traced
from flexattn.frontend.launch_cache import launch_cache
from flexattn.frontend.plan import judged_apart
from flexattn.mods import Bound
from flexattn.mods.derivative import without_stops
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem.facts import facts_of
from flexattn.runtime.launch import Outputs
from flexattn.runtime.ragged import PackedLaunch, packed_problem, prepare_packed
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
    as_documents: Callable[[], Attended],
) -> Outputs | None:
    """out [total_q, Hq, Dv], and lse [total_q, Hq] where asked for; None if it does not serve.

    Mods see the number of a sequence, and positions from its first query and key. as_documents:
    the same call with a document mask, by which a kernel's first launch is judged.
    """
    if not _is_plain(q, k, v, *cu_seqlens, sinks):
        return None
    try:
        score, mask = (
            None if fn is None else bind_on(fn, kind, q)[0]
            for fn, kind in ((score_mod, "score"), (mask_mod, "mask"))
        )
    except FlexAttnError:  # the call with a document mask says what is wrong
        return None
    if score is not None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in score.tensors):
            return None
        score = without_stops(score)
    cu_q, cu_k = (x.to(torch.int32).contiguous() for x in cu_seqlens)
    while True:
        launch = _launch(q, k, v, len(cu_q) - 1, score, mask, scale, sinks, lse)
        if launch is None:
            return None
        rest = launch.rest_of(None, score, mask)
        found = launch.run(q, k, v, cu_q, cu_k, scale, rest, sinks)
        subject = replace(LaunchedKernels.of(launch.choice), sources=launch.kernel_sources)
        ways = () if judged_apart(q) else (partial(_judge, launch, found, as_documents),)
        if accepted(subject, ways):
            return found


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
    """True of tensors on one Hopper GPU that nothing traces, transforms or differentiates."""
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
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
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
