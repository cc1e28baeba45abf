"""A made-up batch for a plan, and what holds the rows of its requests to the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexattn.kernels.paged_decode.config import Scales
from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.reference import Precision, Reference, attention
from flexattn.serving.cache import scales_shape, spread_scale
from flexattn.serving.request import LAYOUTS, Maxima
from flexattn.serving.tuned import ServingProblem
from flexattn.verify.gate import judge
from flexattn.verify.oracle import Judge, moved

# Requests that the oracle sees, the first and the last among them.
JUDGED = 4
# Of a cache of eight bits.
K_SCALE, V_SCALE = 0.75, 1.25


class PlanWork(Protocol):
    """A plan's problem, and the query positions and keys of each request of a batch."""

    @property
    def problem(self) -> ServingProblem: ...
    @property
    def q_lens(self) -> tuple[int, ...]: ...
    @property
    def kv_lens(self) -> tuple[int, ...]: ...
    @property
    def scale(self) -> float: ...
    @property
    def score(self) -> Bound | None: ...
    @property
    def mask(self) -> Bound | None: ...


@dataclass(frozen=True)
class Batch:
    """q [rows, Hq, D]; K and V as the task's layout has them; lengths and table int32.

    V is a view of K for MLA. cu_seqlens only where requests differ in their queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None
    cu_seqlens: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scales: Scales = ""

    def keys(self, m: Maxima, b: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of request b as they count: [Hkv, count, D] in q's dtype or wider."""
        found = []
        for cache, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            where: Any = slice(b, b + 1)
            if self.table is not None:
                where = self.table[b, : -(-count // m.page)].long()
            each = cache[where]
            if self.scales and scale is not None:
                each, scale = (
                    each.float() * spread_scale(scale, self.scales, m.layout)[where],
                    None,
                )
            each = each if m.layout == "HND" else each.transpose(1, 2)  # [pages, Hkv, page, D]
            each = each.transpose(0, 1).flatten(1, 2)[:, :count]
            found.append(each if scale is None else each.float() * scale)
        return found[0], found[1]


def make_batch(task: PlanWork, where: torch.device) -> Batch:
    """Normal random tensors, the same each time; the pages of the requests are in random order."""
    m, form = task.problem.maxima, task.problem.form
    draw = torch.Generator(where).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = m.dtype) -> Tensor:
        made = torch.empty(shape, dtype=m.dtype, device=where).normal_(generator=draw)
        return made.to(dtype)

    def numbers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    counts = [-(-n // m.page) if m.page else 1 for n in task.kv_lens]
    pages, keys = (sum(counts), m.page) if m.page else (len(counts), max(task.kv_lens))
    shape = [pages, 0, 0]
    keys_at, heads_at = LAYOUTS[m.layout]
    shape[keys_at], shape[heads_at] = keys, m.Hkv
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
    ends = torch.tensor([0, *task.q_lens]).cumsum(0).tolist()
    k_scale, v_scale = (
        torch.full((1,), size, device=where) if form.scaled else None
        for size in (K_SCALE, V_SCALE)
    )
    if form.scales:
        sizes = scales_shape(form.scales, m.layout, (pages, keys, m.Hkv))
        k_scale, v_scale = (
            size + torch.rand(sizes, generator=draw, device=where) for size in (K_SCALE, V_SCALE)
        )
    return Batch(
        q=normal(sum(task.q_lens), m.Hq, m.head_dim_qk),
        k=k,
        v=normal(*shape, m.head_dim_v, dtype=m.kv_dtype) if v is None else v,
        lens=numbers(task.kv_lens),
        table=table,
        cu_seqlens=numbers(ends) if m.total_q else None,
        sinks=torch.randn(m.Hq, generator=draw, device=where) if form.sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
        scales=form.scales,
    )


def serving_judge(task: PlanWork, batch: Batch) -> Judge:
    """What holds the rows of some requests to the oracle, which is computed here, once."""
    count = len(task.kv_lens)
    chosen = sorted({0, count - 1, *range(0, count, max(1, count // JUDGED))})
    starts = torch.tensor([0, *task.q_lens]).cumsum(0).tolist()
    rows = [row for b in chosen for row in range(starts[b], starts[b + 1])]
    with torch.no_grad():
        exact, rounded = (
            _joined([_request(task, batch, b, starts[b], each) for b in chosen])
            for each in (Precision.ORACLE, Precision.ROUNDED)
        )

    def judged(got: Any) -> Any:
        out, lse = got[0].flatten(0, -3)[rows], got[1]
        found = out.transpose(0, 1)[None]
        sums = None if lse is None else lse.flatten(0, -2)[rows].T[None]
        return judge((found, sums, None), exact, rounded, batch.q.dtype)

    return judged


def _joined(found: list[Reference]) -> Reference:
    return Reference(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


def _request(task: PlanWork, batch: Batch, b: int, start: int, precision: Precision) -> Reference:
    """Attention of one request, whose mods see its number and its logical positions."""
    q_len, kv_len = task.q_lens[b], task.kv_lens[b]
    past = kv_len - q_len
    q = batch.q[start : start + q_len].transpose(0, 1)[None]
    k, v = (each[None] for each in batch.keys(task.problem.maxima, b, kv_len))
    score, mask = moved(task.score, q.device), moved(task.mask, q.device)
    score_mod, mask_mod = score_callable(score), mask_callable(mask)

    def scored(s: Tensor, i: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if score_mod is not None:
            s = score_mod(s, i + b, h, m + past, n)
        if mask_mod is None:
            return s
        return torch.where(mask_mod(i + b, h, m + past, n), s, -torch.inf)

    modded = score_mod is not None or mask_mod is not None
    return attention(
        q, k, v, score_mod=scored if modded else None, scale=task.scale, sinks=batch.sinks,
        precision=precision,
    )  # fmt: skip
