"""Plans are verified when they are built, by runs on made-up batches and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import WrongKernelError
from flexattn.kernels.base.source import Source
from flexattn.problem.serving import LAYOUTS
from flexattn.reference.cache_append import MAX_FINITE, appended
from flexattn.runtime.dispatch import Choice
from flexattn.runtime.launch import Outputs
from flexattn.runtime.outcomes import Outcome
from flexattn.serving.append_checks import Rope
from flexattn.serving.batch import make_batch, serving_judge
from flexattn.serving.cache import scales_shape
from flexattn.verify.first_use import LaunchedKernels, accepted, due
from flexattn.verify.gate import ErrorRow, Verdict
from flexattn.verify.made_up import apart
from flexattn.verify.samples import Unjudged

if TYPE_CHECKING:
    from flexattn.serving.append import AppendPlan
    from flexattn.serving.cascade import CascadePlan
    from flexattn.serving.plan import DecodePlan

# Keys of the longest request: more than any tile has, and no multiple of one.
_KEYS = 389
_REQUESTS = 3


def is_right(plan: DecodePlan, choice: Choice) -> bool:
    """Whether a new plan's kernels are verified, or agree with plain torch on a made-up batch.

    The first pass of a cascade leaves parts: `check_cascade` judges them when they are merged.
    """
    if plan.form.prefix:
        return True
    subject = LaunchedKernels.of(choice)
    return not due(subject) or accepted(subject, lambda: _judge(plan))


def _judge(plan: DecodePlan) -> Verdict:
    m, where = plan.problem, plan.device
    kv = min(m.kv_len, _KEYS)
    requests = min(m.B, _REQUESTS)
    q_lens = (min(m.q_len, kv),) * requests
    if m.total_q:  # a chunk, then single queries as far as there is room
        chunk = max(1, min(m.total_q - requests + 1, kv, 37))
        requests = min(requests, m.total_q)
        q_lens = (chunk, *[1] * (requests - 1))
    lens = (kv, max(q_lens[-1], kv // 3), max(q_lens[-1], kv // 2 + 1))[:requests]
    with apart(where):
        batch = make_batch(m, q_lens, lens, where)
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
        judged = serving_judge(batch, plan.scale, plan._score, plan._mask)
        return judged(Outputs(out, lse, None))


def check_cascade(cascade: CascadePlan, merge: Source | None) -> None:
    """Raise WrongKernelError unless a cascade's kernels are verified, or agree with plain torch.

    merge: the kernel that merges both passes.
    """
    own, first = (
        LaunchedKernels.of(each._kernels.choice) for each in (cascade.own, cascade.prefix)
    )
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
    step = own.problem.page or 1
    shared = min(cascade.prefix.problem.kv_len, _KEYS) // step * step
    if not shared or (own.form.scales and not own.problem.page):
        raise Unjudged("a made-up batch has no whole page to share, or scales beside its keys")
    kv = min(own.problem.kv_len, _KEYS // 2)
    requests, q_len = min(own.problem.B, _REQUESTS), min(own.problem.q_len, kv)
    lens = tuple(shared + max(q_len, kv // (b + 1)) for b in range(requests))
    m = replace(own.problem, kv_len=shared + kv)
    with apart(where):
        batch = make_batch(m, (q_len,) * requests, lens, where)
        caches: list[Any] = [(batch.k, batch.v), None]
        tables: list[Tensor | None] = [None, None]
        if batch.table is not None:
            batch.table[:, : shared // step] = batch.table[0, : shared // step]
            tables = [batch.table[:, shared // step :].contiguous(), None]
            tables[1] = batch.table[:1, : shared // step].contiguous()
        else:
            axis = LAYOUTS[m.cache_layout][0]
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
        judged = serving_judge(batch, own.scale, own._score, own._mask)
        verdict = judged(Outputs(out, lse, None))
    for each in (cascade.own, cascade.prefix):
        each._forget()
    return verdict


_TOKENS = 11
_PAGES = 5
_ELEMENTS = 2**24


def check_append(
    plan: AppendPlan, source: Source, target: Device, scaled: Any, rope: Rope | None
) -> None:
    """Raise WrongKernelError unless a new plan's kernel is verified, or stores what torch does."""
    title = f"append for {plan.append}"
    subject = LaunchedKernels(
        (source,), target, lambda: (title, "its one kernel"), Outcome("built")
    )
    if due(subject) and not accepted(subject, lambda: _judge_append(plan, scaled, rope)):
        raise WrongKernelError(
            f"{title}: the kernel stores other numbers than plain torch on {target.name}",
            "a kernel's first launch agrees with plain torch",
            "store with torch's index_put, and send the file that was named",
        )


def _judge_append(plan: AppendPlan, scaled: Any, rope: Rope | None) -> Verdict:
    a, where = plan.append, plan.device
    pages = _PAGES if a.page > 3 else _TOKENS
    if pages * a.page * a.heads * (a.head_dim_qk + a.head_dim_v) > _ELEMENTS:
        raise Unjudged("its pages are too large for a made-up cache")
    draw = torch.Generator(where).manual_seed(0)
    heads = [a.heads] if a.layout == "HND" else []
    shape = [pages, *heads, a.page, *([] if heads else [a.heads])]
    dims = [dim for dim in (a.head_dim_qk, a.head_dim_v) if dim]
    with apart(where):
        new = [torch.randn(_TOKENS, a.heads, d, generator=draw, device=where) for d in dims]
        k = new[0].to(a.dtype)
        v = new[1].to(a.dtype) if len(dims) > 1 else None
        cache = [torch.zeros(*shape, d, device=where).to(a.kv_dtype) for d in dims]
        scales: list[Tensor | None] = [None] * len(dims)
        if scaled:
            size = [1]
            if scaled not in (True, "tensor", "head"):
                size = list(scales_shape(scaled, a.layout, (pages, a.page, a.heads)))
            scales = [
                0.01 + torch.rand(size, generator=draw, device=where, dtype=torch.float32)
                for _ in dims
            ]
        slots, positions, found = _placed(plan, pages)
        tables: tuple[Tensor, ...] = ()
        if rope is not None and rope.base is None:
            angles = torch.arange(64.0, device=where)[:, None] / torch.arange(
                1.0, rope.dim // 2 + 1, device=where
            )
            tables = angles.cos().to(rope.table), angles.sin().to(rope.table)
        about = {"page": a.page, "layout": a.layout, "scaled": scaled, "rope": rope}
        caches, steps = appended(
            k, v, (*cache, None)[:2], (*scales, None)[:2], slots.tolist(),
            positions=positions, tables=tables, **about,
        )  # fmt: skip
        names = ("k_scale", "v_scale")
        found |= {name: x for name, x in zip(names, scales, strict=False) if x is not None}
        if rope is not None and plan.append.slots is not None:
            found["positions"] = positions.to(plan.append.slots)
        found |= dict(zip(("cos", "sin"), tables, strict=False))
        plan.run(k, v, (cache[0], cache[-1]) if v is not None else cache[0], **found)
        pairs = [*zip(cache, caches, strict=False), *zip(scales, steps, strict=False)]
        rows = [_row(got, want) for got, want in pairs if got is not None and want is not None]
    return Verdict(tuple(rows), (), ())


def _placed(plan: AppendPlan, pages: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of each token its slot and position, and what tells a run where tokens go."""
    a, where = plan.append, plan.device
    if a.slots is not None:
        slots = torch.arange(_TOKENS, device=where) * 3 % (pages * a.page)
        return slots, slots % 13, {"slot_mapping": slots.to(a.slots)}
    # One request, whose last keys are the tokens, in pages in reverse.
    keys = min(pages * a.page, _TOKENS + a.page // 2)
    positions = torch.arange(keys - _TOKENS, keys, device=where)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=where)[None]
    slots = table[0, positions // a.page] * a.page + positions % a.page
    found = {"block_table": table, "seq_lens": torch.tensor([keys], device=where).int()}
    if plan.form.slots == "ragged table":
        found["cu_seqlens_q"] = torch.tensor([0, _TOKENS], dtype=torch.int32, device=where)
    return slots, positions, found


def _row(got: Tensor, want: Tensor) -> ErrorRow:
    """The share of numbers that are not those of torch, nor their neighbours in the dtype.

    Cosines of a GPU and of torch differ in their last bits, which rounding may show.
    """
    name = "scales" if got.dtype == torch.float32 and want.dim() < 4 else "cache"
    eps = torch.finfo(got.dtype).eps
    mine, theirs = got.float(), want.float()
    most = eps * theirs.abs() + (2.0**-9 if got.dtype in MAX_FINITE else 1e-6)
    wrong = ((mine - theirs).abs() > most) | (mine.isnan() != theirs.isnan())
    return ErrorRow(name, float(wrong.float().mean()), 0.0, 0.0)
