"""Tensors of a serving row, the plan that serves it, and the check of what it computes.

The same files serve every checkout that `bench.trees` races, so they need public names alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.inputs import CHECKED, E4M3, attention, off
from bench.serving_rows import WINDOWED, ServingRow

SCALE = 0.75  # of an eight-bit cache
# Of a cascade or a tree, changes of the pass over a request's own keys: "own.per_sm=1".
OWN = "own."
Levels = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Served:
    """q [B, q_len, Hq, D], or [rows, Hq, D] of a ragged batch; K and V [pages, page, Hkv, D].

    K and V are [B, keys, Hkv, D] for page 0. lens int32 [B]. table int32 [B, pages of a request],
    None for page 0. scales: of K, and the same of V. chosen int32 [B, Hkv, k], of rows that
    choose.
    """

    row: ServingRow
    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None
    score_mod: Any
    mask_mod: Any
    sinks: Tensor | None
    scales: Tensor | None
    chosen: Tensor | None = None

    def mask(self, b: int, head: int) -> Any:
        """The mask of request b and a key head: the row's, of the keys that they chose."""
        if self.chosen is None:
            return self.mask_mod
        unit = self.row.chosen[1]
        units = torch.zeros(-(-max(self.row.lens) // unit), dtype=torch.bool, device=self.q.device)
        units[self.chosen[b, head].long()] = True
        return lambda b, h, q_idx, kv_idx: units[kv_idx // unit]

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """K and V of request b as they count, [keys, Hkv, D] in a float dtype."""
        n, own = self.row.lens[b], None
        k, v = self.k, self.v
        if self.table is None:
            k, v = k[b], v[b]
        else:
            own = self.table[b, : -(-n // self.row.page)].long()
            k, v = k[own].flatten(0, 1), v[own].flatten(0, 1)
        if self.scales is not None:
            scales = self.scales
            if self.row.scaled == "token_head":
                scales = scales[own].flatten(0, 1)[..., None]
            k, v = k.float() * scales, v.float() * scales
        return k[:n], v[:n]


def make_served(row: ServingRow, device: str = "cuda") -> Served:
    """Normal random tensors, the same for a row's name on every run of one device type."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(row.name.encode()))
    dtype, batch = getattr(torch, row.dtype), len(row.lens)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    table, sizes = None, (batch, max(row.lens))
    if row.page:
        table, pages = block_table(row.lens, row.nodes, row.page)
        table, sizes = table.to(device), (pages, row.page)
    k = normal(*sizes, row.hkv, row.d)
    v = k[..., : row.dv] if row.latent else normal(*sizes, row.hkv, row.dv)
    scales = None
    if row.eight_bits:
        k, scales = k.to(E4M3), torch.full((1,), SCALE, device=device)
        v = k[..., : row.dv] if row.latent else v.to(E4M3)
        if row.scaled == "token_head":
            scales = torch.rand(k.shape[:3], generator=generator, device=device) + SCALE
    rows = (sum(row.new),) if row.new else (batch, row.q_len)
    q = normal(*rows, row.hq, row.d)
    lens = torch.tensor(row.lens, dtype=torch.int32, device=device)
    sinks = normal(row.hq, dtype=torch.float32) if row.variant == "sinks" else None
    mods = _mods_of(row, lens, device)
    return Served(row, q, k, v, lens, table, *mods, sinks, scales, _chosen(row, device))


def _chosen(row: ServingRow, device: str) -> Tensor | None:
    """The units that each request and key head chose, of those that it has."""
    k, unit = row.chosen
    if not unit:
        return None
    generator = torch.Generator(device).manual_seed(2)
    units = torch.tensor([-(-n // unit) for n in row.lens], device=device)[:, None, None]
    sizes = len(row.lens), row.hkv, int(units.max())
    scores = torch.rand(sizes, generator=generator, device=device)
    scores = scores.masked_fill(torch.arange(sizes[2], device=device) >= units, -1.0)
    return scores.topk(min(k, sizes[2])).indices.int()


def _mods_of(row: ServingRow, lens: Tensor, device: str) -> tuple[Any, Any]:
    """The row's score_mod and mask_mod; lens int32 [B] on the device."""
    from flexattn import catalogue

    score = mask = None
    if row.variant == "softcap":
        score = catalogue.softcap(30.0)
    elif row.variant == "alibi":
        score = catalogue.alibi(row.hq, device)
    elif row.variant == "window":
        mask = catalogue.sliding_window(max(row.lens) // WINDOWED - 1)
    elif row.variant == "by-position":
        score = _by_position
    elif row.variant == "tree":
        mask = _draft_tree(row.q_len, lens - row.q_len, device)
    if mask is None and (row.variant == "causal" or row.new):
        mask = catalogue.causal
    return score, mask


def _by_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A mod that no catalogue has: a bias that saturates with the distance."""
    distance = q_idx - kv_idx
    return score - distance / (distance.abs() + 64.0 * (h + 1))


def _draft_tree(nodes: int, past: Tensor, device: str) -> Any:
    """Draft tokens see all keys before them, and their ancestors."""
    above = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate([0, 0, 0, 1, 1, 2, 3, 3][:nodes]):
        above[node] |= above[parent]
    above = above.to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < past[b]) | above[q_idx - past[b], (kv_idx - past[b]).clamp(min=0)]

    return mask_mod


def check_requests(out: Tensor, x: Served) -> str:
    """The faults of an output [B, q_len, Hq, Dv] or [rows, Hq, Dv], in words.

    The first and the last head of the first two requests, of one between, and of the last.
    """
    row, found, first, batch = x.row, "", 0, len(x.row.lens)
    q, flat = x.q.reshape(-1, row.hq, row.d), out.reshape(-1, row.hq, row.dv)
    for b, (n, new) in enumerate(zip(row.lens, row.rows, strict=True)):
        begin, first = first, first + new
        if b not in (0, 1, batch // 2, batch - 1):
            continue
        k, v = (each.double() for each in x.keys(b))
        some = torch.arange(new, device=q.device)[-CHECKED:]
        for h in sorted({0, row.hq - 1}):
            head = h // (row.hq // row.hkv)
            given = (
                q[begin + some, h].double(), k[:, head], v[:, head], (b, h), some + n - new,
                x.score_mod, x.mask(b, head), None if x.sinks is None else x.sinks[h],
            )  # fmt: skip
            exact, rounded = (attention(*given, coarse=each) for each in (None, x.q.dtype))
            found += off(f"out[{b}, {h}]", flat[begin + some, h], exact, rounded)
    return found


def planned(
    x: Served, changes: Mapping[str, Any] | None = None, invariant: bool = False
) -> partial[Tensor]:
    """A plan's run of a row, to which more may be given by name.

    changes: fields of its config; behind OWN those of the second pass where requests share keys.
    invariant: each row's bits are its own.
    """
    from flexattn import serving

    row = x.row
    about: dict[str, Any] = {
        "heads": (row.hq, row.hkv), "head_dim": (row.d, row.dv), "device": x.q.device,
        "dtype": x.q.dtype, "page_size": row.page, "kv_dtype": x.k.dtype, "kv_len": max(row.lens),
        "score_mod": x.score_mod, "mask_mod": x.mask_mod, "scaled": row.scaled,
        "batch": len(row.lens),
    }  # fmt: skip
    about |= {"total_q": sum(row.new)} if row.new else {"q_len": row.q_len}
    call: dict[str, Any] = {"seq_lens": x.lens, "block_table": x.table}
    if row.shares:
        return _sharing(x, about, call, changes or {})
    about["sinks"] = x.sinks is not None
    if row.latent:
        about["shared_kv"] = True
    if x.chosen is not None:
        about["selection"] = x.chosen.shape[2], row.chosen[1]
        call["selection"] = x.chosen
    if invariant:
        about["batch_invariant"] = True
    call |= {"k_scale": x.scales, "v_scale": x.scales, "sinks": x.sinks}
    if row.new:
        ends = torch.tensor([0, *row.new], device=x.q.device)
        call["cu_seqlens_q"] = ends.cumsum(0, dtype=torch.int32)
    plan = serving.DecodePlan(**about)
    if changes:
        plan = serving.DecodePlan(**about, config=replace(plan.config, **changes))
    cache = x.k if row.latent else (x.k, x.v)
    return partial(plan.run, x.q, cache, **call)


def _sharing(
    x: Served, about: dict[str, Any], call: dict[str, Any], changes: Mapping[str, Any]
) -> partial[Tensor]:
    """A CascadePlan for one level where a checkout has one, else its TreePlan."""
    from flexattn import serving

    row, first = x.row, "shared"
    assert x.table is not None
    kind: Any = getattr(serving, "CascadePlan", None)
    if len(row.nodes) == 1 and kind is not None:
        pages, start = row.shared // row.page, torch.full_like(x.lens, row.shared)
        del about["kv_len"]
        about |= {"prefix_len": row.shared, "own_len": max(row.lens) - row.shared}
        call |= {
            "prefix_len": start[:1].clone(), "kv_start": start,
            "prefix_table": x.table[:1, :pages].contiguous(),
            "block_table": x.table[:, pages:].contiguous(),
        }  # fmt: skip
        first = "prefix"
    else:
        kind = serving.TreePlan
    plan = kind(**about)
    if changes:
        rest = {key: value for key, value in changes.items() if OWN not in key}
        own = {key.removeprefix(OWN): value for key, value in changes.items() if OWN in key}
        about[f"{first}_config"] = replace(getattr(plan, first).config, **rest)
        plan = kind(**about, config=replace(plan.own.config, **own))
    if first == "shared":
        plan.update(prefix_tree(len(row.lens), row.nodes), x.table)

    def run(**more: Any) -> Tensor:
        out: Tensor = plan.run(x.q, (x.k, x.v), **call, **more)[0]
        return out

    return partial(run)


def node_of(request: int, nodes: int, requests: int) -> int:
    """The node of a level of so many nodes that a request is below."""
    return request * nodes // requests


def block_table(lens: Sequence[int], levels: Levels, page: int) -> tuple[Tensor, int]:
    """Pages of each request int32 [B, most pages], in random order; and how many there are.

    levels: of what requests share the number of nodes, and keys of each.
    """
    shared = [(nodes, keys // page) for nodes, keys in levels]
    common = sum(pages for _, pages in shared)
    own = [-(-n // page) - common for n in lens]
    total = sum(nodes * pages for nodes, pages in shared) + sum(own)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(len(lens), common + max(own), dtype=torch.int32)
    place = column = 0
    for nodes, pages in shared:
        for b in range(len(lens)):
            start = place + node_of(b, nodes, len(lens)) * pages
            table[b, column : column + pages] = order[start : start + pages]
        place, column = place + nodes * pages, column + pages
    for b, count in enumerate(own):
        table[b, common : common + count] = order[place : place + count]
        place += count
    return table, total


def prefix_tree(requests: int, levels: Levels) -> Any:
    """The PrefixTree of such levels."""
    from flexattn import serving

    parents: list[int] = []
    begins = [0]
    for level, (nodes, _) in enumerate(levels):
        above = [-1] * nodes
        for b in range(requests) if level else ():
            parent = node_of(b, levels[level - 1][0], requests)
            above[node_of(b, nodes, requests)] = begins[-2] + parent
        parents, begins = parents + above, [*begins, begins[-1] + nodes]
    keys = tuple(each for nodes, each in levels for _ in range(nodes))
    leaves = (begins[-2] + node_of(b, levels[-1][0], requests) for b in range(requests))
    return serving.PrefixTree(tuple(parents), keys, tuple(leaves))
