"""A made-up batch for a plan, and what holds the rows of its requests to the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.problem.serving import LAYOUTS, ServingProblem
from flexattn.reference import Precision, Reference, attention
from flexattn.serving.cache import scales_shape, spread_scale
from flexattn.verify.gate import judge
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
        made = torch.empty(shape, dtype=m.dtype, device=where).normal_(generator=draw)
        return made.to(dtype)

    def numbers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=where)

    counts = [-(-n // m.page) if m.page else 1 for n in kv_lens]
    pages, keys = (sum(counts), m.page) if m.page else (len(counts), max(kv_lens))
    shape = [pages, 0, 0]
    keys_at, heads_at = LAYOUTS[m.cache_layout]
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
    )


def serving_judge(batch: Batch, scale: float, score: Bound | None, mask: Bound | None) -> Judge:
    """What holds the rows of some requests to the oracle, which is computed here, once."""
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
        return judge((found, sums, None), exact, rounded, batch.q.dtype)

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
    q = batch.q[start : start + q_len].transpose(0, 1)[None]
    k, v = (each[None] for each in batch.keys(b))
    score, mask = moved(score, q.device), moved(mask, q.device)
    score_mod, mask_mod = score_callable(score), mask_callable(mask)

    def scored(s: Tensor, i: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if score_mod is not None:
            s = score_mod(s, i + b, h, m + past, n)
        if mask_mod is None:
            return s
        return torch.where(mask_mod(i + b, h, m + past, n), s, -torch.inf)

    modded = score_mod is not None or mask_mod is not None
    return attention(
        q, k, v, score_mod=scored if modded else None, scale=scale, sinks=batch.sinks,
        precision=precision,
    )  # fmt: skip
