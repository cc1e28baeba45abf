"""A plan is verified when it is built, by a run of a made-up batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.errors import WrongKernelError
from flexattn.kernels.base.source import Source
from flexattn.mods import Bound
from flexattn.runtime.launch import Outputs
from flexattn.serving.batch import make_batch, serving_judge
from flexattn.serving.kernels import Kernels
from flexattn.serving.request import LAYOUTS
from flexattn.serving.tuned import ServingProblem
from flexattn.verify.first_use import LaunchedKernels, accepted, due
from flexattn.verify.gate import Verdict
from flexattn.verify.made_up import apart
from flexattn.verify.samples import Unjudged

if TYPE_CHECKING:
    from flexattn.serving.cascade import CascadePlan
    from flexattn.serving.plan import DecodePlan

# Keys of the longest request: more than any tile has, and no multiple of one.
_KEYS = 389
_REQUESTS = 3


@dataclass(frozen=True)
class _Work:
    """A small batch for a plan; see flexattn.serving.batch.Work."""

    problem: ServingProblem
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    scale: float
    score: Bound | None
    mask: Bound | None


def is_right(plan: DecodePlan, kernels: Kernels, score: Bound | None, mask: Bound | None) -> bool:
    """Whether a new plan's kernels are verified, or agree with plain torch on a made-up batch.

    The first pass of a cascade leaves parts: `check_cascade` judges them when they are merged.
    """
    if plan.form.prefix:
        return True
    subject = _subject(plan, kernels)
    return not due(subject) or accepted(subject, lambda: _judge(plan, score, mask))


def _subject(plan: DecodePlan, kernels: Kernels) -> LaunchedKernels:
    sources: tuple[Source, ...] = (kernels.attend.source,)
    if kernels.combine is not None:
        sources += (kernels.combine.source,)
    problem = ServingProblem(plan.form, plan.maxima, "mixed" if plan.maxima.total_q else "ragged")
    tried = kernels.attempts[-1]
    assert tried.outcome is not None
    return LaunchedKernels(
        sources,
        kernels.target,
        lambda: (problem.describe(), tried.candidate),
        tried.outcome,
        kernels.tuned,
    )


def _judge(plan: DecodePlan, score: Bound | None, mask: Bound | None) -> Verdict:
    m, where = plan.maxima, plan.device
    kv = min(m.kv_len, _KEYS)
    requests = min(m.batch, _REQUESTS)
    q_lens = (min(m.q_len, kv),) * requests
    if m.total_q:  # a chunk, then single queries as far as there is room
        chunk = max(1, min(m.total_q - requests + 1, kv, 37))
        requests = min(requests, m.total_q)
        q_lens = (chunk, *[1] * (requests - 1))
    lens = (kv, max(q_lens[-1], kv // 3), max(q_lens[-1], kv // 2 + 1))[:requests]
    problem = ServingProblem(plan.form, m, "mixed" if m.total_q else "ragged")
    work = _Work(problem, q_lens, lens, plan.scale, score, mask)
    with apart(where):
        batch = make_batch(work, where)
        q = batch.q if m.total_q else batch.q.unflatten(0, (requests, -1))
        start = (
            torch.zeros(requests, dtype=torch.int32, device=where) if plan.form.offset else None
        )
        out = q.new_full((*q.shape[:-1], m.head_dim_v), torch.nan)
        lse = torch.full(q.shape[:-1], torch.nan, device=where) if plan.form.lse else None
        plan.run(
            q, (batch.k, batch.v), seq_lens=batch.lens, block_table=batch.table,
            cu_seqlens_q=batch.cu_seqlens, sinks=batch.sinks, k_scale=batch.k_scale,
            v_scale=batch.v_scale, kv_start=start, out=out, lse=lse,
        )  # fmt: skip
        verdict: Verdict = serving_judge(work, batch)(Outputs(out, lse, None))
    return verdict


def check_cascade(cascade: CascadePlan, merge: Source | None) -> None:
    """Raise WrongKernelError unless a cascade's kernels are verified, or agree with plain torch.

    merge: the kernel that merges both passes.
    """
    own = _subject(cascade.own, cascade.own._kernels)
    first = _subject(cascade.prefix, cascade.prefix._kernels)
    sources = first.sources if merge is None else (*first.sources, merge)
    subject = replace(first, sources=sources, tuned=own.tuned and first.tuned)
    if due(subject) and not accepted(subject, lambda: _judge_cascade(cascade)):
        raise WrongKernelError(
            f"a cascade of {subject.title}: its kernels are wrong on {subject.device.name}",
            "a kernel's first launch agrees with plain torch",
            "use a DecodePlan, and send the file that was named",
        )


def _judge_cascade(cascade: CascadePlan) -> Verdict:
    own, where = cascade.own, cascade.own.device
    step = own.maxima.page or 1
    shared = min(cascade.prefix.maxima.kv_len, _KEYS) // step * step
    if not shared or (own.form.scales and not own.maxima.page):
        raise Unjudged("a made-up batch has no whole page to share, or scales beside its keys")
    kv = min(own.maxima.kv_len, _KEYS // 2)
    requests, q_len = min(own.maxima.batch, _REQUESTS), min(own.maxima.q_len, kv)
    lens = tuple(shared + max(q_len, kv // (b + 1)) for b in range(requests))
    m = replace(own.maxima, kv_len=shared + kv)
    problem = ServingProblem(own.form, m, "ragged")
    score, mask = own._score, own._mask
    work = _Work(problem, (q_len,) * requests, lens, own.scale, score, mask)
    with apart(where):
        batch = make_batch(work, where)
        caches: list[Any] = [(batch.k, batch.v), None]
        tables: list[Tensor | None] = [None, None]
        if batch.table is not None:
            batch.table[:, : shared // step] = batch.table[0, : shared // step]
            tables = [batch.table[:, shared // step :].contiguous(), None]
            tables[1] = batch.table[:1, : shared // step].contiguous()
        else:
            axis = LAYOUTS[m.layout][0]
            for x in (batch.k, batch.v):
                x.narrow(axis, 0, shared).copy_(x[:1].narrow(axis, 0, shared).clone())
            behind = max(lens) - shared
            caches = [
                tuple(x.narrow(axis, shared, behind).contiguous() for x in caches[0]),
                tuple(x[:1].narrow(axis, 0, shared).contiguous() for x in caches[0]),
            ]
        first = torch.tensor([shared], dtype=torch.int32, device=where)
        out, lse = cascade.run(
            batch.q.unflatten(0, (requests, -1)), caches[0], prefix_len=first,
            seq_lens=batch.lens, prefix_table=tables[1], block_table=tables[0],
            prefix_cache=caches[1], kv_start=first.expand(requests).contiguous(),
            sinks=batch.sinks, k_scale=batch.k_scale, v_scale=batch.v_scale,
        )  # fmt: skip
        verdict: Verdict = serving_judge(work, batch)(Outputs(out, lse, None))
    for each in (cascade.own, cascade.prefix):
        each._forget()
    return verdict
