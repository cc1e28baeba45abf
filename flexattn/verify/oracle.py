"""The tensors that a problem is measured on, its oracle, and rows that stand for a large call.

Tensors are seeded, and laid out as the problem's Layout says. The oracle takes a task's mods as
callables and its block lists. If a shape is too large for float64, some of its rows are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.expr import MaskMod
from flexattn.problem import DTYPES, FP8, Problem, Sparsity, out_dtype
from flexattn.problem.mask_lists import dense_blocks
from flexattn.reference import Precision, Reference, SomeRows, attention, float_of_indices
from flexattn.runtime.launch import Lists
from flexattn.verify.gate import NAMES, Triple, Verdict, badness, judge

Judge: TypeAlias = Callable[[Triple], Verdict]

# Up to so many scores and elements of k and v everything is judged, above it slices.
WHOLE_SCORES = 2**25
WHOLE_KV = 2**27


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    score: Bound | None,
    mask: Bound | None,
    lists: Lists | None,
    sparsity: Sparsity | None,
    sinks: Tensor | None = None,
) -> Judge:
    """The judge of attention of q [B, Hq, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev], sinks [Hq].

    All of them where the oracle is affordable; else the first, middle and last rows of three heads
    stand for the others. It is computed here, once for all.
    """
    score_mod, mask_mod = score_callable(score), mask_callable(mask)
    (B, Hq, L, _), S = q.shape, k.shape[2]
    block_mask = block_mask_of(lists, sparsity, mask_mod, (L, S))
    large = B * Hq * L * S > WHOLE_SCORES or k.numel() + v.numel() > WHOLE_KV
    places = [*_some_rows(B, Hq, L, q.device)] if large else [None]

    def run(at: SomeRows | None, precision: Precision) -> Reference:
        rows, logits = q, sinks
        if at is not None:
            rows, logits = at.of(q), None if sinks is None else sinks[at.h]
        with float_of_indices(precision):
            return attention(
                rows, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=logits,
                precision=precision, at=at,
            )  # fmt: skip

    with torch.no_grad():
        runs = [(at, run(at, Precision.ORACLE), run(at, Precision.ROUNDED)) for at in places]
    shapes = (B, Hq, L, v.shape[3]), (B, Hq, L), (B, Hq, L)

    def judged(got: Triple) -> Verdict:
        for name, x, shape in zip(NAMES, got, shapes, strict=True):
            if x is not None and x.shape != shape:
                return Verdict((), (f"{name} has shape {tuple(x.shape)}, not {shape}",), ())
        verdicts = []
        for at, exact, rounded in runs:
            out, lse, maxima = (x if at is None or x is None else at.of(x) for x in got)
            verdicts.append(judge((out, lse, maxima), exact, rounded, out_dtype(q.dtype)))
        # Each by itself: long rows, whose values are small, are not excused by the larger errors
        # of short ones.
        return max(verdicts, key=badness)

    return judged


_SLICE_ROWS = 64


def _some_rows(batch: int, heads: int, rows: int, where: torch.device) -> Iterator[SomeRows]:
    """The first, middle and last rows of three heads."""
    for b, h in sorted({(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)}):
        last = max(rows - _SLICE_ROWS, 0)
        for first in sorted({0, last // 2, last}):
            some = torch.arange(first, min(first + _SLICE_ROWS, rows), device=where)
            yield SomeRows(some.new_tensor([b]), some.new_tensor([h]), some, heads)


def kept_lanes(lists: Lists, sparsity: Sparsity, mask_mod: MaskMod | None, kv_len: int) -> MaskMod:
    """Which lanes a kernel attends: full blocks whole, partial ones where mask_mod says so."""
    cols = -(-kv_len // sparsity.kv_block)
    partial = dense_blocks(lists.kv_num, lists.kv_idx, cols)
    full = None
    if lists.full_num is not None and lists.full_idx is not None:
        full = dense_blocks(lists.full_num, lists.full_idx, cols)

    def lane(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = [
            b % partial.shape[0],
            h % partial.shape[1],
            q_idx // sparsity.q_block,
            kv_idx // sparsity.kv_block,
        ]
        listed: Tensor = torch.ops.aten.index.Tensor(partial, place)
        if mask_mod is not None:
            listed = listed & mask_mod(b, h, q_idx, kv_idx)
        return listed if full is None else listed | torch.ops.aten.index.Tensor(full, place)

    return lane


def block_mask_of(
    lists: Lists | None,
    sparsity: Sparsity | None,
    mask_mod: MaskMod | None,
    lengths: tuple[int, int],
) -> BlockMask | None:
    """The BlockMask that lists are of; None without them."""
    if lists is None or sparsity is None:
        return None
    # Without lists by key, which torch makes wrongly of fewer columns than there are blocks.
    block = sparsity.q_block, sparsity.kv_block
    return BlockMask(lengths, *lists[:4], *(None,) * 4, block, mask_mod or noop_mask)


_TORCH = {name: dtype for dtype, name in (DTYPES | FP8).items()}


def make_inputs(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, q_len, D], k [B, Hkv, kv_len, D], v [B, Hkv, kv_len, Dv], normal, equal each time.

    A head dimension that is not contiguous has stride 2; tensors that are not aligned start
    beside a 16-byte border.
    """
    s, p = problem.structure, problem
    layout = s.layout
    draw = torch.Generator(device).manual_seed(0)
    sizes = (
        ("q", p.Hq, p.q_len, s.head_dim_qk, layout.q_contiguous),
        ("k", p.Hkv, p.kv_len, s.head_dim_qk, layout.k_contiguous),
        ("v", p.Hkv, p.kv_len, s.head_dim_v, layout.v_contiguous),
    )
    q, k, v = (
        _normal(
            (p.B, heads, length, dim), _TORCH[s.dtype_of(name)], contiguous, layout.aligned, draw
        )
        for name, heads, length, dim, contiguous in sizes
    )
    return q, k, v


def make_sinks(problem: Problem, device: torch.device) -> Tensor | None:
    """Sinks [Hq] for `make_inputs`, equal each time; None where the problem has none."""
    if not problem.structure.sinks:
        return None
    draw = torch.Generator(device).manual_seed(1)
    sinks = torch.randn(problem.Hq, generator=draw, device=device)
    return sinks.to(_TORCH[problem.structure.sinks])


def gradient_like(out: Tensor) -> Tensor:
    """A normal random gradient of an output, equal each time."""
    draw = torch.Generator(out.device).manual_seed(2)
    return torch.randn(out.shape, generator=draw, device=out.device).to(out.dtype)


def moved(bound: Bound | None, where: torch.device | str) -> Bound | None:
    """A mod with what it captures on a device, as data: nothing of it requires a gradient."""
    if bound is None:
        return None
    return bound._replace(tensors=tuple(x.detach().to(where) for x in bound.tensors))


def _normal(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    contiguous: bool,
    aligned: bool,
    draw: torch.Generator,
) -> Tensor:
    """A view of wider rows: whole 16 bytes each, or one element beside that."""
    dim, step, per_line = shape[-1], 1 if contiguous else 2, 16 // dtype.itemsize
    offset = 0 if aligned else 1
    width = dim * step + offset
    if aligned:
        width = -(-width // per_line) * per_line
    drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype
    rows = torch.empty((*shape[:-1], width), dtype=drawn, device=draw.device)
    rows = rows.normal_(generator=draw).to(dtype)
    return rows[..., offset : offset + dim * step : step]
