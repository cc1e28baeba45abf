"""Calls of flex_attention in `bench.trees`, and plain torch in float64 that checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["CHECKED", "E4M3", "Case", "attention", "call_case", "mods_of", "wrong"]

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
# Rows of one head that are checked at once, and of a forward at most.
PIECE, CHECKED = 512, 512


class Case(NamedTuple):
    """A call to time, and a check that returns in words what is wrong with its results."""

    call: Callable[[], Any]
    check: Callable[[], str]


class Mods(NamedTuple):
    """A row's mods: score(table) is the score_mod over a learned table, None without one."""

    score: Callable[[Tensor | None], Any]
    mask: Any
    table: Tensor | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, at: tuple[int, int], places: Tensor, score: Any, mask: Any,
    sink: Tensor | None = None, coarse: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention of some rows of a head, by the definition: q [n, D], k [S, D], v [S, Dv], float64.

    at: batch and head. places: positions of the rows. coarse: scores and weights are rounded to
    it, as a careful kernel rounds them.
    """
    b, h = (torch.tensor(each, device=q.device) for each in at)
    rows, keys = places[:, None], torch.arange(len(k), device=q.device)

    def rounded(x: Tensor) -> Tensor:
        return x if coarse is None else x.to(coarse).double()

    scores = rounded(q @ k.T) / math.sqrt(q.shape[-1])
    if score is not None:
        scores = rounded(score(scores, b, h, rows, keys).double())
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, rows, keys), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().expand(len(q), 1)], 1)
    weights = scores.softmax(-1).nan_to_num(0.0)[:, : len(k)]  # a row without keys gives zeros
    return rounded(weights) @ v


def wrong(name: str, got: Tensor, exact: Tensor, rounded: Tensor) -> str:
    """The errors of `got` beyond twice those of the rounded reference, plus one ulp, in words.

    That of the largest number and of the root mean square, each.
    """
    if got.shape != exact.shape or not bool(got.isfinite().all()):
        return f"{name}: {tuple(got.shape)} of {tuple(exact.shape)}, or not finite; "
    ulp, dtype, found = torch.finfo(got.dtype).eps, got.dtype, ""
    for kind in ("max", "rms"):

        def size(x: Tensor, kind: str = kind) -> float:
            return float(x.abs().max() if kind == "max" else x.square().mean().sqrt())

        error, theirs = size(got.double() - exact), size(rounded.to(dtype).double() - exact)
        budget = 2 * theirs + ulp * size(exact)
        if not error <= budget:
            found += f"{name}: {kind} error {error:.3e}, budget {budget:.3e}; "
    return found


def mods_of(x: Any, device: str, lens: Tensor | None = None, past: Tensor | None = None) -> Mods:
    """The mods of a row. lens, past: of a plan's requests, their keys and those before the new."""
    from flexattn import and_masks, catalogue

    score: Callable[[Tensor | None], Any] = {
        "none": lambda table: None,
        "alibi": lambda table: catalogue.alibi(x.hq, device),
        "softcap": lambda table: catalogue.softcap(x.cap),
        "relative": lambda table: catalogue.relative_bias(table, x.kv_len),
    }[x.score]
    table = None
    if x.score == "relative":
        table = torch.randn(x.hq, 2 * x.kv_len, device=device, dtype=torch.bfloat16)
        table.requires_grad_(x.learned)
    mask: Any = None
    if x.mask == "causal":
        mask = catalogue.causal
    elif x.mask == "window":
        mask = catalogue.sliding_window(x.window)
    elif x.mask == "documents":
        ends = torch.tensor([0, *x.documents], device=device).cumsum(0)
        mask = and_masks(catalogue.document(catalogue.document_ids(ends)), catalogue.causal)
    elif x.mask == "natten":
        width = 2 ** (x.kv_len.bit_length() // 2)
        mask = catalogue.natten_2d(x.kv_len // width, width, min(13, x.kv_len // width))
    elif x.mask == "tree":
        mask = draft_tree(max(x.new), past, device)
    elif x.mask != "full":
        raise ValueError(f"no mask is named {x.mask}")
    return Mods(score, mask, table)


def draft_tree(nodes: int, past: Any, device: str) -> Any:
    """Draft tokens see all keys before them, and their ancestors."""
    above = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate([0, 0, 0, 1, 1, 2, 3, 3][:nodes]):
        above[node] |= above[parent]
    above = above.to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < past[b]) | above[q_idx - past[b], (kv_idx - past[b]).clamp(min=0)]

    return mask_mod


def call_case(x: Any, device: str) -> Case:
    """A call of flex_attention on normal random tensors, the same on both sides."""
    from flexattn import create_block_mask, flex_attention

    eight = x.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if eight else getattr(torch, x.dtype)
    q, k, v = (
        torch.randn(x.batch, *shape, device=device, dtype=dtype)
        for shape in ((x.hq, x.q_len, x.d), (x.hkv, x.kv_len, x.d), (x.hkv, x.kv_len, x.dv))
    )
    mods = mods_of(x, device)
    mask = None
    if mods.mask is not None:
        mask = create_block_mask(mods.mask, None, None, x.q_len, x.kv_len, device)
    about: dict[str, Any] = {"score_mod": mods.score(mods.table), "block_mask": mask}
    about["enable_gqa"] = x.hq != x.hkv
    if x.invariant:
        about["kernel_options"] = {"BATCH_INVARIANT": True}
    plain = [each.double() for each in (q, k, v)]
    if eight:
        factors = [each.float().abs().amax((2, 3)) / LARGEST for each in (q, k, v)]
        q, k, v = (
            (each / factor[..., None, None]).to(E4M3)
            for each, factor in zip((q, k, v), factors, strict=True)
        )
        names = ("q_descale", "k_descale", "v_descale")
        about |= dict(zip(names, factors, strict=True))
        plain = [
            each.double() * factor[..., None, None].double()
            for each, factor in zip((q, k, v), factors, strict=True)
        ]

    def call() -> Tensor:
        return flex_attention(q, k, v, **about)

    def check() -> str:
        torch.full_like(q, math.nan, dtype=dtype)  # the allocator hands it out next
        out = call()
        found = checked_rows(out, plain, mods, x, dtype)
        if x.invariant:
            alone = flex_attention(q[:1], k[:1], v[:1], **about)
            found += "" if torch.equal(alone, out[:1]) else "bits follow the batch; "
        return found

    if x.backward:
        return backward_case(q, k, v, about, mods, x)
    if x.grows:
        lengths = cycle(range(x.grows, x.kv_len + 1))

        def growing() -> Tensor:
            keys = next(lengths)
            return flex_attention(q, k[:, :, :keys], v[:, :, :keys], **about)

        return Case(growing, check)
    return Case(call, check)


def checked_rows(out: Tensor, plain: list[Tensor], mods: Mods, x: Any, dtype: torch.dtype) -> str:
    """The rows at both ends and some between, of the first and the last head."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.arange(x.q_len)
    if x.q_len > CHECKED:
        third = CHECKED // 3
        rows = torch.cat([rows[:third], rows[-third:], torch.randperm(x.q_len, generator=draw)])
        rows = rows[:CHECKED].unique()
    rows, group, found = rows.to(out.device), x.hq // x.hkv, ""
    q, k, v = plain
    score = mods.score(None if mods.table is None else mods.table.detach())
    for b, h in sorted({(0, 0), (x.batch - 1, x.hq - 1)}):
        given = (q[b, h, rows], k[b, h // group], v[b, h // group], (b, h), rows, score, mods.mask)
        exact, rounded = (attention(*given, coarse=each) for each in (None, dtype))
        found += wrong(f"out[{b}, {h}]", out[b, h, rows], exact, rounded)
    return found


def backward_case(
    q: Tensor, k: Tensor, v: Tensor, about: dict[str, Any], mods: Mods, x: Any
) -> Case:
    """Gradients of q, k, v and a learned table, by one backward of a forward that is kept."""
    from flexattn import flex_attention

    leaves = [each.requires_grad_() for each in (q, k, v)]
    if mods.table is not None:
        leaves.append(mods.table)
    with torch.enable_grad():
        out = flex_attention(q, k, v, **about)
    given = torch.randn_like(out)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, given, retain_graph=True)

    def check() -> str:
        got = call()
        exact, rounded = (gradients(q, k, v, given, mods, x, each) for each in (None, q.dtype))
        heads = x.hq // x.hkv
        ours = [got[0][-1, :heads], got[1][-1, 0], got[2][-1, 0], *(g[:heads] for g in got[3:])]
        names = ("dq", "dk", "dv", "dtable")
        found = zip(names, ours, exact, rounded, strict=False)
        return "".join(wrong(*each) for each in found)

    return Case(call, check)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, given: Tensor, mods: Mods, x: Any, coarse: Any
) -> list[Tensor]:
    """Of the first key head, in the last batch; those of a table are summed over all batches."""
    heads = x.hq // x.hkv
    found: list[Tensor] = []
    table = None if mods.table is None else mods.table.detach().double().requires_grad_()
    score = mods.score(table)
    for b in range(0 if table is not None else x.batch - 1, x.batch):
        parts = [q[b, :heads], k[b, 0], v[b, 0]]
        leaves = [each.detach().double().requires_grad_() for each in parts]
        for h in range(heads):
            for first in range(0, x.q_len, PIECE):
                rows = torch.arange(first, min(first + PIECE, x.q_len), device=q.device)
                with torch.enable_grad():
                    out = attention(
                        leaves[0][h, rows], leaves[1], leaves[2], (b, h), rows, score, mods.mask,
                        coarse=coarse,
                    )  # fmt: skip
                out.backward(given[b, h, rows].double())
        found = [each.grad for each in leaves if each.grad is not None]
    return found if table is None or table.grad is None else [*found, table.grad[:heads]]
