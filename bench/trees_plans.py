"""Plans of `bench.trees`: a DecodePlan's runs, a tree's or a cascade's, and an AppendPlan's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.trees_calls import CHECKED, E4M3, Case, attention, mods_of, wrong

__all__ = ["append_case", "block_table", "plan_case", "prefix_tree"]


def plan_case(x: Any, device: str) -> Case:
    """A DecodePlan's run, or a TreePlan's where requests share keys that are read once."""
    from flexattn import serving

    batch, rows, dtype = len(x.lens), sum(x.new), getattr(torch, x.dtype)
    table, pages = block_table(x.lens, x.levels, x.page) if x.page else (None, batch)
    keys = x.page or max(x.lens)
    k = torch.randn(pages, keys, x.hkv, x.d, device=device, dtype=dtype)
    v = k[..., : x.dv]
    if not x.mla:
        v = torch.randn(pages, keys, x.hkv, x.dv, device=device, dtype=dtype)
    scale = None
    if x.fp8:
        k, v, scale = k.to(E4M3), v.to(E4M3), torch.full((1,), 0.75, device=device)
        if x.fp8 == "token_head":
            scale = torch.rand(pages, keys, x.hkv, device=device) + 0.75
    lens = torch.tensor(x.lens, dtype=torch.int32, device=device)
    table = None if table is None else table.to(device)
    shape = (rows,) if x.ragged else (batch, x.new[0])
    q = torch.randn(*shape, x.hq, x.d, device=device, dtype=dtype)
    sinks = torch.randn(x.hq, device=device) if x.sinks else None
    past = lens - torch.tensor(x.new, dtype=torch.int32, device=device)
    mods = mods_of(x, device, lens, past)
    about: dict[str, Any] = {
        "heads": (x.hq, x.hkv), "head_dim": (x.d, x.dv), "device": device, "dtype": dtype,
        "page_size": x.page, "kv_dtype": k.dtype, "score_mod": mods.score(None), "batch": batch,
        "mask_mod": mods.mask, "sinks": x.sinks, "kv_len": max(x.lens),
        "scaled": x.fp8 if x.fp8 == "token_head" else bool(x.fp8),
    }  # fmt: skip
    about |= {"total_q": rows} if x.ragged else {"q_len": x.new[0]}
    call: dict[str, Any] = {
        "seq_lens": lens, "block_table": table, "k_scale": scale, "v_scale": scale, "sinks": sinks,
    }  # fmt: skip
    if x.ragged:
        ends = torch.tensor([0, *x.new], device=device)
        call["cu_seqlens_q"] = ends.cumsum(0, dtype=torch.int32)
    cache = k if x.mla else (k, v)

    def check_with(out: Tensor) -> str:
        found, flat, first = "", out.reshape(rows, x.hq, x.dv), 0
        for b, (n, new) in enumerate(zip(x.lens, x.new, strict=True)):
            begin, first = first, first + new
            if b not in (0, 1, batch // 2, batch - 1):
                continue
            own = slice(None) if table is None else table[b, : -(-n // x.page)].long()
            kb, vb = (
                (each[b] if table is None else each[own].flatten(0, 1))[:n].double()
                for each in (k, v)
            )
            if scale is not None:
                fine = x.fp8 == "token_head"
                factor = scale[own].flatten(0, 1)[:n, :, None] if fine else scale
                kb, vb = kb * factor, vb * factor
            some = torch.arange(new, device=device)[-CHECKED:]
            for h in sorted({0, x.hq - 1}):
                head = h // (x.hq // x.hkv)
                given = (
                    q.reshape(rows, x.hq, x.d)[begin + some, h].double(), kb[:, head],
                    vb[:, head], (b, h), some + n - new, mods.score(None), mods.mask,
                    None if sinks is None else sinks[h],
                )  # fmt: skip
                exact, rounded = (attention(*given, coarse=each) for each in (None, dtype))
                found += wrong(f"out[{b}, {h}]", flat[begin + some, h], exact, rounded)
        return found

    if x.shares:
        return sharing_case(x, about, q, cache, call, check_with)
    if x.mla:
        about["shared_kv"] = True
    if x.invariant:
        about["batch_invariant"] = True
    plan = serving.DecodePlan(**about)

    def check() -> str:
        out = torch.full((*shape, x.hq, x.dv), math.nan, device=device, dtype=dtype)
        plan.run(q, cache, out=out, **call)
        found = check_with(out)
        if x.invariant:
            one = {"seq_lens": lens[:1], "block_table": None if table is None else table[:1]}
            alone = plan.run(q[:1], cache, **call | one)
            found += "" if torch.equal(alone[:1], out[:1]) else "bits follow the batch; "
        return found

    return Case(lambda: plan.run(q, cache, **call), check)


Levels = Sequence[tuple[int, int]]


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


def sharing_case(
    x: Any, about: dict[str, Any], q: Tensor, cache: Any, call: dict[str, Any],
    check_with: Callable[[Tensor], str],
) -> Case:  # fmt: skip
    """A checkout's CascadePlan for one level where it has one, else its TreePlan."""
    from flexattn import serving

    table = call["block_table"]
    call = {name: call[name] for name in ("seq_lens", "block_table")}
    cascade = getattr(serving, "CascadePlan", None)
    if len(x.levels) == 1 and cascade is not None:
        about.pop("kv_len")
        plan = cascade(prefix_len=x.shared, own_len=max(x.lens) - x.shared, **about)
        start, pages = torch.full_like(call["seq_lens"], x.shared), x.shared // x.page
        call |= {"prefix_len": start[:1].clone(), "kv_start": start}
        call["prefix_table"] = table[:1, :pages].contiguous()
        call["block_table"] = table[:, pages:].contiguous()
    else:
        plan = serving.TreePlan(**about)
        plan.update(prefix_tree(len(x.lens), x.levels), table)
    return Case(
        lambda: plan.run(q, cache, **call), lambda: check_with(plan.run(q, cache, **call)[0])
    )


def append_case(x: Any, device: str) -> Case:
    """An AppendPlan's run: new tokens of bfloat16 into pages in random order."""
    from flexattn import serving

    k, v = (torch.randn(x.tokens, x.hkv, x.d, device=device).bfloat16() for _ in "kv")
    pages = 4 * -(-x.tokens // x.page)
    dtype = E4M3 if x.scaled else torch.bfloat16
    caches = tuple(torch.zeros(pages, x.page, x.hkv, x.d, device=device).to(dtype) for _ in "kv")
    slots = torch.randperm(pages * x.page, generator=torch.Generator().manual_seed(1))
    slots = slots[: x.tokens].to(device)
    call: dict[str, Any] = {"slot_mapping": slots}
    scaled: Any = x.scaled if x.scaled == "token_head" else bool(x.scaled)
    if x.scaled:
        shape = (pages, x.page, x.hkv) if scaled == "token_head" else (1,)
        call |= {name: torch.full(shape, 0.5, device=device) for name in ("k_scale", "v_scale")}
    if x.rope:
        call["positions"] = torch.arange(x.tokens, device=device)
    plan = serving.AppendPlan(
        heads=x.hkv, head_dim=x.d, page_size=x.page, kv_dtype=dtype, scaled=scaled, device=device,
        rope=serving.Rope(x.d, base=1e4) if x.rope else None,
    )  # fmt: skip

    def check() -> str:
        plan.run(k, v, caches, **call)
        found = ""
        for name, new, cache in zip("kv", (k.double(), v.double()), caches, strict=True):
            if x.rope and name == "k":
                half = torch.arange(0, x.d, 2, device=device).double() / x.d
                turn = call["positions"][:, None, None].double() * 1e4**-half
                a, b = new.chunk(2, -1)
                new = torch.cat(
                    [a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1
                )
            stored = cache.flatten(0, 1)[slots].double()
            scale = 1.0
            if x.scaled:
                scale = call[f"{name}_scale"]
                scale = scale.flatten(0, 1)[slots, :, None] if scaled == "token_head" else scale
            error = (stored * scale - new).abs()
            # Half a step of e4m3, and float32's of an angle as large as the last position.
            angle = x.tokens * 2**-23 * new.abs().amax(-1, keepdim=True) if x.rope else 0.0
            if not bool((error <= new.abs() * 2**-4 + scale * 2**-9 + angle).all()):
                found += f"{name}: stored numbers are off by {float(error.max()):.3e}; "
        return found

    return Case(lambda: plan.run(k, v, caches, **call), check)
