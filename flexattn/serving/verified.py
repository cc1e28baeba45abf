"""Made-up batches and tokens of a plan, and the checks of its first runs on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.device import Device
from flexattn.errors import WrongKernelError
from flexattn.kernels.base.source import Source
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.problem.mask_lists import dense_blocks
from flexattn.problem.serving import DECODE_QUERIES, LAYOUTS, Phase, ServingProblem
from flexattn.reference import Precision, Reference, attention
from flexattn.reference.cache_append import MAX_FINITE, appended
from flexattn.runtime.launch import Outputs
from flexattn.runtime.outcomes import Outcome
from flexattn.serving.append_checks import Rope
from flexattn.serving.cache import cache_shape, scales_shape, spread_scale
from flexattn.verify.first_use import LaunchedKernels, Unjudged, Way, accepted, verification
from flexattn.verify.gate import ErrorRow, Verdict, judge
from flexattn.verify.made_up import apart
from flexattn.verify.oracle import Judge, moved

# Of a mixed batch each so many-th request brings a chunk of prefill, the others one query.
CHUNKED = 8
# Requests that the oracle sees, the first and the last among them.
JUDGED = 4
# Of a cache of eight bits.
K_SCALE, V_SCALE = 0.75, 1.25


@dataclass(frozen=True)
class Batch:
    """q [rows, Hq, D]; K and V as the problem's layout has them; lengths and table int32.

    q_lens, kv_lens: query positions and keys of each request; the queries are a request's last
    positions. V is a view of K for MLA. cu_seqlens only where requests differ in their queries.
    """

    problem: ServingProblem
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None
    cu_seqlens: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    selection: Tensor | None

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """K and V of request b as they count: [Hkv, keys, D] in q's dtype or wider."""
        found, m, count = [], self.problem, self.kv_lens[b]
        scales = m.structure.scales
        for cache, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            where: Any = slice(b, b + 1)
            if self.table is not None:
                where = self.table[b, : -(-count // m.page)].long()
            each = cache[where]
            if scales and scale is not None:
                spread = spread_scale(scale, scales, m.cache_layout)[where]
                each, scale = each.float() * spread, None
            if m.cache_layout == "NHD":
                each = each.transpose(1, 2)  # [pages, Hkv, page, D]
            each = each.transpose(0, 1).flatten(1, 2)[:, :count]
            found.append(each if scale is None else each.float() * scale)
        return found[0], found[1]


def batch_lengths(
    lengths: str, batch: int, q_len: int, kv_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query positions and keys of each request of a class.

    ragged: as lengths of live traffic, the i-th of kv_len / (i + 1)^0.8 keys, at least 128.
    """
    if lengths == "mixed":
        q_lens = tuple(q_len if b % CHUNKED == 0 else 1 for b in range(batch))
        return q_lens, (kv_len,) * batch
    q_lens = (q_len,) * batch
    if lengths == "uniform":
        return q_lens, (kv_len,) * batch
    least = min(kv_len, max(128, q_len))
    return q_lens, tuple(max(least, int(kv_len / (b + 1) ** 0.8)) for b in range(batch))


def make_batch(
    m: ServingProblem, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], where: torch.device
) -> Batch:
    """Normal random tensors, the same each time; the pages of the requests are in random order."""
    form = m.structure
    draw = torch.Generator(where).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = m.dtype) -> Tensor:
        made = torch.empty(shape, dtype=m.out_dtype, device=where).normal_(generator=draw)
        return made.to(dtype)

    def numbers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    counts = [-(-n // m.page) if m.page else 1 for n in kv_lens]
    pages, keys = (sum(counts), m.page) if m.page else (len(counts), max(kv_lens))
    shape = cache_shape(m.cache_layout, pages, keys, m.Hkv)
    table = None
    if m.page:
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        rows, place = [], 0
        for count in counts:
            rows.append(order[place : place + count] + [0] * (max(counts) - count))
            place += count
        table = numbers(rows)
    k = normal(*shape, m.head_dim_qk, dtype=m.kv_dtype)
    v = k[..., : m.head_dim_v] if form.shared_kv else None
    ends = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    k_scale, v_scale = (
        torch.full((1,), size, device=where) if form.scaled else None
        for size in (K_SCALE, V_SCALE)
    )
    if form.scales:
        sizes = scales_shape(form.scales, m.cache_layout, (pages, keys, m.Hkv))
        k_scale, v_scale = (
            size + torch.rand(sizes, generator=draw, device=where) for size in (K_SCALE, V_SCALE)
        )
    return Batch(
        problem=m,
        q_lens=q_lens,
        kv_lens=kv_lens,
        q=normal(sum(q_lens), m.Hq, m.head_dim_qk),
        k=k,
        v=normal(*shape, m.head_dim_v, dtype=m.kv_dtype) if v is None else v,
        lens=numbers(kv_lens),
        table=table,
        cu_seqlens=numbers(ends) if m.total_q else None,
        sinks=torch.randn(m.Hq, generator=draw, device=where) if form.sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
        selection=torch.randint(
            -1, -(-max(kv_lens) // form.unit) + 1, (len(counts), m.Hkv, form.chosen),
            generator=draw, device=where, dtype=torch.int32,
        ) if form.unit else None,
    )  # fmt: skip


def batch_run(plan: DecodePlan, batch: Batch) -> Callable[[], Outputs]:
    """A call that runs a plan on a batch; its outputs hold NaN before the first run."""
    m, where = batch.problem, plan.device
    q = batch.q if m.total_q else batch.q.unflatten(0, (len(batch.q_lens), -1))
    out = q.new_full((*q.shape[:-1], m.head_dim_v), torch.nan, dtype=m.out_dtype)
    lse = torch.full(q.shape[:-1], torch.nan, device=where) if plan.form.lse else None
    given: dict[str, Any] = {
        "seq_lens": batch.lens, "block_table": batch.table, "cu_seqlens_q": batch.cu_seqlens,
        "sinks": batch.sinks, "k_scale": batch.k_scale, "v_scale": batch.v_scale, "out": out,
        "lse": lse, "kv_start": torch.zeros_like(batch.lens) if plan.form.offset else None,
        "selection": batch.selection,
    }  # fmt: skip

    def run() -> Outputs:
        plan.run(q, (batch.k, batch.v), **given)
        return Outputs(out, lse, None)

    return run


def serving_judge(batch: Batch, scale: float, score: Bound | None, mask: Bound | None) -> Judge:
    """A judge that compares some requests' rows with the oracle, which is computed here, once."""
    count, mods = len(batch.kv_lens), (scale, score, mask)
    chosen = sorted({0, count - 1, *range(0, count, max(1, count // JUDGED))})
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).tolist()
    rows = [row for b in chosen for row in range(starts[b], starts[b + 1])]
    with torch.no_grad():
        exact, rounded = (
            _joined([_request(batch, b, starts[b], *mods, each) for b in chosen])
            for each in (Precision.ORACLE, Precision.ROUNDED)
        )

    def judged(got: Any) -> Any:
        out, lse = got[0].flatten(0, -3)[rows], got[1]
        found = out.transpose(0, 1)[None]
        sums = None if lse is None else lse.flatten(0, -2)[rows].T[None]
        return judge((found, sums, None), exact, rounded, batch.problem.out_dtype)

    return judged


def _joined(found: list[Reference]) -> Reference:
    return Reference(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


def _request(
    batch: Batch,
    b: int,
    start: int,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    precision: Precision,
) -> Reference:
    """Attention of one request, whose mods see its number and its logical positions."""
    q_len, kv_len = batch.q_lens[b], batch.kv_lens[b]
    past = kv_len - q_len
    # Weights of a plan are never rounded to eight bits.
    q = batch.q[start : start + q_len].transpose(0, 1)[None].to(batch.problem.out_dtype)
    k, v = (each[None] for each in batch.keys(b))
    score, mask = moved(score, q.device), moved(mask, q.device)
    score_mod, mask_mod = score_callable(score), mask_callable(mask)

    form, chosen = batch.problem.structure, None
    if batch.selection is not None:
        each = batch.selection[b]
        counts = torch.full(each.shape[:1], form.chosen, device=q.device)
        chosen = dense_blocks(counts, each, -(-kv_len // form.unit))[0, 0]

    def scored(s: Tensor, i: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if score_mod is not None:
            s = score_mod(s, i + b, h, m + past, n)
        if chosen is not None:
            s = torch.where(chosen[h // form.group, n // form.unit], s, -torch.inf)
        if mask_mod is None:
            return s
        return torch.where(mask_mod(i + b, h, m + past, n), s, -torch.inf)

    modded = score_mod is not None or mask_mod is not None or chosen is not None
    return attention(
        q, k, v, score_mod=scored if modded else None, scale=scale, sinks=batch.sinks,
        precision=precision,
    )  # fmt: skip


if TYPE_CHECKING:
    from flexattn.serving.append import AppendPlan
    from flexattn.serving.cascade import CascadePlan
    from flexattn.serving.kernels import Kernels
    from flexattn.serving.plan import DecodePlan

# Keys of the longest request: more than any tile has, and no multiple of one.
_KEYS = 389
# Of prefills whose keys are cut into parts.
_CUT_KEYS = 1101
_REQUESTS = 3


def is_right(plan: DecodePlan, kernels: Kernels) -> bool:
    """True if a new plan's kernels are verified, or agree with plain torch on a made-up batch.

    The first pass of a cascade leaves parts: `check_cascade` judges them when they are merged.
    """
    if plan.form.prefix:
        return True
    prefills = kernels.prefills
    if prefills is not None:
        subject = LaunchedKernels.of(prefills.choice)
        own = [prefills.row_tiles, *filter(None, [prefills.merge])]
        subject = replace(subject, sources=(*subject.sources, *(each.source for each in own)))
        right = accepted(subject, [partial(_judge_prefills, plan, prefills.merge is not None)])
        plan._num_sms = kernels.target.num_sms
        plan._forget()
        if not right:
            return False
        if kernels.attend is None:
            return True
    phase: Phase = "" if prefills is None else "decode"
    subject = LaunchedKernels.of(kernels.choice)
    if kernels.chooser is not None:
        subject = replace(subject, sources=(*subject.sources, kernels.chooser.source))
    return accepted(subject, [partial(_judge, plan, phase)])


def verified_by(plan: DecodePlan) -> str:
    """How a plan's kernels were verified when it was made, in words for logs."""
    choices = [each.choice for each in (plan._kernels, plan._kernels.prefills) if each is not None]
    return ", ".join({verification(LaunchedKernels.of(each)) or "never": 0 for each in choices})


def _judge_prefills(plan: DecodePlan, splits: bool) -> Verdict:
    """The verdict on prefills, and with splits on keys in parts."""
    plan._num_sms = 1  # of a few rows the streaming kernel would serve all
    verdict = _judge(plan, "prefill")
    if not (verdict.passed and splits):
        return verdict
    plan._num_sms = plan._kernels.target.num_sms
    plan._forget()
    return _judge(plan, "prefill", 17, _CUT_KEYS, 1)


def _judge(
    plan: DecodePlan, phase: Phase, rows: int = 137, keys: int = _KEYS, most: int = _REQUESTS
) -> Verdict:
    """The verdict on a run over a made-up batch of requests in a phase."""
    m, where = plan.problem, plan.device
    kv = min(m.kv_len, keys)
    requests = min(m.B, most)
    q_lens = (min(m.q_len, kv),) * requests
    if m.total_q:  # a chunk, then single queries as far as there is room
        chunk = {"": 37, "decode": DECODE_QUERIES, "prefill": rows}[phase]
        chunk = max(1, min(m.total_q - requests + 1, kv, chunk))
        requests = min(requests, 1 + m.total_q - chunk)
        q_lens = (chunk, *[1] * (requests - 1))
    lens = (kv, max(q_lens[-1], kv // 3), max(q_lens[-1], kv // 2 + 1))[:requests]
    with apart(where):
        batch = make_batch(m, q_lens, lens, where)
        judged = serving_judge(batch, plan.scale, plan._score, plan._mask)
        return judged(batch_run(plan, batch)())


def check_cascade(cascade: CascadePlan, merge: Source | None) -> None:
    """Raise WrongKernelError unless a cascade's kernels are verified, or agree with plain torch.

    merge: the kernel that merges both passes.
    """
    own, first = (
        LaunchedKernels.of(each._kernels.choice) for each in (cascade.own, cascade.prefix)
    )
    sources = first.sources if merge is None else (*first.sources, merge)
    subject = replace(first, sources=sources, tuned=own.tuned and first.tuned)
    wrong = f"a cascade of {subject.title}: its kernels are wrong on {subject.device.name}"
    _need(subject, partial(_judge_cascade, cascade), wrong, "use a DecodePlan")


def _need(subject: LaunchedKernels, judged: Way, wrong: str, do: str) -> None:
    if not accepted(subject, [judged]):
        rule = "a kernel's first launch agrees with plain torch"
        raise WrongKernelError(wrong, rule, f"{do}, and send the file that was named")


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


def check_append(plan: AppendPlan, source: Source, target: Device, rope: Rope | None) -> None:
    """Raise WrongKernelError unless a new plan's kernel is verified, or stores what torch does."""
    title = plan.problem.describe()
    subject = LaunchedKernels(
        (source,), target, lambda: (title, "its one kernel"), Outcome("built")
    )
    wrong = f"{title}: the kernel stores other numbers than plain torch on {target.name}"
    _need(subject, partial(_judge_append, plan, rope), wrong, "store with torch's index_put")


def _judge_append(plan: AppendPlan, rope: Rope | None) -> Verdict:
    m, a, where = plan.problem, plan.form, plan.device
    pages = _PAGES if a.page > 3 else _TOKENS
    if pages * a.page * a.heads * (a.head_dim_qk + a.head_dim_v) > _ELEMENTS:
        raise Unjudged("its pages are too large for a made-up cache")
    draw = torch.Generator(where).manual_seed(0)
    shape = cache_shape(m.cache_layout, pages, a.page, a.heads)
    dims = [dim for dim in (a.head_dim_qk, a.head_dim_v) if dim]
    with apart(where):
        new = [torch.randn(_TOKENS, a.heads, d, generator=draw, device=where) for d in dims]
        k = new[0].to(m.dtype)
        v = new[1].to(m.dtype) if len(dims) > 1 else None
        cache = [torch.zeros(*shape, d, device=where).to(m.kv_dtype) for d in dims]
        size: tuple[int, ...] = (1,)
        if a.scales != "tensor":
            size = scales_shape(a.scales, m.cache_layout, (pages, a.page, a.heads))
        scales = [
            0.01 + torch.rand(size, generator=draw, device=where, dtype=torch.float32)
            for _ in dims
            if a.scales
        ]
        slots, positions, found = _placed(plan, pages)
        tables: tuple[Tensor, ...] = ()
        if rope is not None and rope.base is None:
            angles = torch.arange(64.0, device=where)[:, None] / torch.arange(
                1.0, rope.dim // 2 + 1, device=where
            )
            tables = angles.cos().to(rope.table), angles.sin().to(rope.table)
        caches, steps = appended(
            k, v, (*cache, None)[:2], (*scales, None, None)[:2], slots.tolist(), page=a.page,
            layout=m.cache_layout, scaled=a.scales, rope=rope, positions=positions, tables=tables,
        )  # fmt: skip
        found |= dict(zip(("k_scale", "v_scale"), scales, strict=False))
        if rope is not None and plan.problem.slots is not None:
            found["positions"] = positions.to(plan.problem.slots)
        found |= dict(zip(("cos", "sin"), tables, strict=False))
        plan.run(k, v, (cache[0], cache[-1]) if v is not None else cache[0], **found)
        pairs = [*zip(cache, caches, strict=False), *zip(scales, steps, strict=False)]
        rows = [_row(got, want) for got, want in pairs if want is not None]
    return Verdict(tuple(rows), (), ())


def _placed(plan: AppendPlan, pages: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The slot and position of each token, and the arguments that tell a run where tokens go."""
    m, a, where = plan.problem, plan.form, plan.device
    if m.slots is not None:
        slots = torch.arange(_TOKENS, device=where) * 3 % (pages * a.page)
        return slots, slots % 13, {"slot_mapping": slots.to(m.slots)}
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
