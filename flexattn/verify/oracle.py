"""The tensors that a problem is measured on, its oracle, and rows that stand for a large call.

Tensors are seeded, and laid out as the problem's Layout says. The oracle takes a task's mods as
callables and its block lists. If a shape is too large for float64, some of its rows are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from flexattn.kernels.printers.torch_printer import mask_callable, score_callable
from flexattn.mods import Bound
from flexattn.mods.expr import MaskMod, ScoreMod
from flexattn.problem import DTYPES, FP8, Problem, Sparsity, out_dtype
from flexattn.problem.inputs import NO_DESCALES, Descales
from flexattn.problem.mask_lists import dense_blocks
from flexattn.reference import Precision, Reference, attention
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

    All of them where the oracle is affordable, else slices. It is computed here, once for all.
    """
    score_mod, mask_mod = score_callable(score), mask_callable(mask)
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if scores > WHOLE_SCORES or k.numel() + v.numel() > WHOLE_KV:
        if lists is not None and sparsity is not None:
            mask_mod = kept_lanes(lists, sparsity, mask_mod, k.shape[2])
        return Slices.of(q, k, v, score_mod, mask_mod, scale, sinks).judge_all
    block_mask = block_mask_of(lists, sparsity, mask_mod, (q.shape[2], k.shape[2]))

    def run(precision: Precision) -> Reference:
        return attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, sinks=sinks,
            precision=precision,
        )  # fmt: skip

    with torch.no_grad():
        exact, rounded = run(Precision.ORACLE), run(Precision.ROUNDED)
    return lambda got: judge(got, exact, rounded, out_dtype(q.dtype))


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


SLICE_ROWS = 64


@dataclass(frozen=True)
class Place:
    """Query rows first..last of one head; its mods are told where the slice stands."""

    b: int
    h: int
    first: int
    last: int

    def of(self, x: Tensor) -> Tensor:
        return x[self.b : self.b + 1, self.h : self.h + 1, self.first : self.last]

    def score_mod(self, user: ScoreMod) -> ScoreMod:
        def moved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return user(score, b + self.b, h + self.h, q_idx + self.first, kv_idx)

        return moved

    def block_mask(self, user: MaskMod, kv_len: int, device: torch.device) -> BlockMask:
        def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return user(b + self.b, h + self.h, q_idx + self.first, kv_idx)

        rows = self.last - self.first
        return create_block_mask(moved, None, None, rows, kv_len, device)


@dataclass(frozen=True)
class Slices:
    """Some rows of the oracle and of the reference run, computed once to judge many runs.

    The rows are the first, middle and last ones of three heads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[tuple[Place, Reference, Reference], ...]

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: ScoreMod | None,
        mask_mod: MaskMod | None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        descales: Descales = NO_DESCALES,
    ) -> Slices:
        """The slices of attention of q [B, Hq, L, E], k [B, Hkv, S, E], v [B, Hkv, S, Ev].

        sinks: [Hq], or None. descales: of fp8's heads.
        """
        runs = []
        group, kv_len = q.shape[1] // k.shape[1], k.shape[2]
        for place in _places(*q.shape[:3]):
            kv = slice(place.h // group, place.h // group + 1)
            b = slice(place.b, place.b + 1)
            score = None if score_mod is None else place.score_mod(score_mod)
            mask = None if mask_mod is None else place.block_mask(mask_mod, kv_len, q.device)
            with torch.no_grad():
                oracle, rounded = (
                    attention(
                        place.of(q),
                        k[b, kv],
                        v[b, kv],
                        score_mod=score,
                        block_mask=mask,
                        scale=scale,
                        sinks=None if sinks is None else sinks[place.h : place.h + 1],
                        descales=_factors(descales, place, kv),
                        precision=precision,
                    )
                    for precision in (Precision.ORACLE, Precision.ROUNDED)
                )
            runs.append((place, oracle, rounded))
        return cls((*q.shape[:3], v.shape[-1]), out_dtype(q.dtype), tuple(runs))

    def judge(self, out: Tensor) -> Verdict:
        """As judge_all, of `out` [B, Hq, L, Ev] alone."""
        return self.judge_all((out, None, None))

    def judge_all(self, got: Triple) -> Verdict:
        """The worst slice's verdict on (out [B, Hq, L, Ev], lse [B, Hq, L], max_scores like it).

        Each slice is judged by itself, so that long rows, whose values are small, are not excused
        by the larger errors of short ones.
        """
        for name, x, shape in zip(NAMES, got, (self.shape, *[self.shape[:3]] * 2), strict=True):
            if x is not None and x.shape != shape:
                return Verdict((), (f"{name} has shape {tuple(x.shape)}, not {shape}",), ())
        verdicts = []
        for place, oracle, rounded in self.runs:
            out, lse, maxima = [None if x is None else place.of(x) for x in got]
            verdicts.append(judge((out, lse, maxima), oracle, rounded, self.dtype))
        return max(verdicts, key=badness)


def _factors(descales: Descales, place: Place, kv: slice) -> Descales:
    """Those of one head."""
    heads = (slice(place.h, place.h + 1), kv, kv)
    b = slice(place.b, place.b + 1)
    return Descales(
        *(None if x is None else x[b, h] for x, h in zip(descales, heads, strict=True))
    )


def _places(batch: int, heads: int, rows: int) -> Iterator[Place]:
    for b, h in sorted({(0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)}):
        last = max(rows - SLICE_ROWS, 0)
        for first in sorted({0, last // 2, last}):
            yield Place(b, h, first, min(first + SLICE_ROWS, rows))
