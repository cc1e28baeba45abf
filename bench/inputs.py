"""Tensors and mods of a row, and plain torch in float64 that checks what is computed from them.

The same files serve every checkout that `bench.trees` races, so they need public names alone.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.rows import BLOCK, NATTEN, Row

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
# What a row's largest weight becomes before weights are rounded to e4m3.
RAISED = 256.0
# Rows of one head that are checked at once, and of a forward at most.
PIECE, CHECKED = 512, 512


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, q_len, D], k and v [B, Hkv, kv_len, D and Dv] and the mods of a row.

    table: what a relative score reads, [Hq, 2 kv_len]. factors: of q, k and v of eight bits,
    float32 [B, heads] each.
    """

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: Any
    mask_mod: Any
    table: Tensor | None = None
    factors: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def gqa(self) -> bool:
        """True where query heads share key heads."""
        return self.row.shape.hq != self.row.shape.hkv

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors of the score_mod that get a gradient."""
        return () if self.table is None or not self.table.requires_grad else (self.table,)

    @property
    def dtype(self) -> torch.dtype:
        """That of the output."""
        return torch.bfloat16 if self.factors else self.q.dtype

    def wide(self, b: int, h: int) -> tuple[Tensor, ...]:
        """q, k and v of one query head as they count, [rows or keys, D] in float64."""
        kv = b, h // (self.row.shape.hq // self.row.shape.hkv)
        places = ((b, h), kv, kv)
        found = [x.detach()[at].double() for x, at in zip(self.tensors, places, strict=True)]
        if self.factors:
            scales = [f[at].double() for f, at in zip(self.factors, places, strict=True)]
            found = [x * scale for x, scale in zip(found, scales, strict=True)]
        return tuple(found)

    def in_bfloat16(self) -> Inputs:
        """The same numbers, as far as bfloat16 holds them, with no factors."""
        q, k, v = (
            (x.float() * factor[..., None, None]).bfloat16()
            for x, factor in zip(self.tensors, self.factors, strict=True)
        )
        return replace(self, q=q, k=k, v=v, factors=())

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of flex_attention; makes the block mask."""
        from flexattn import create_block_mask

        s, mask = self.row.shape, None
        if self.mask_mod is not None:
            mask = create_block_mask(self.mask_mod, None, None, s.q_len, s.kv_len, self.q.device)
        descales = zip(("q_descale", "k_descale", "v_descale"), self.factors, strict=False)
        return {
            "score_mod": self.score_mod, "block_mask": mask, "enable_gqa": self.gqa,
            **dict(descales),
        }  # fmt: skip


def make(row: Row, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Normal random q, k and v, the same for a row's name on every run of one device type."""
    s = row.shape
    dtype = getattr(torch, row.dtype) if row.dtype else dtype
    generator = torch.Generator(device).manual_seed(zlib.crc32(row.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = normal(s.batch, s.hq, s.q_len, s.d)
    k, v = (normal(s.batch, s.hkv, s.kv_len, d) for d in (s.d, row.dv or s.d))
    factors: tuple[Tensor, ...] = ()
    if row.fp8:
        factors = tuple(x.float().abs().amax((2, 3)) / LARGEST for x in (q, k, v))
        q, k, v = (
            (x / factor[..., None, None]).to(E4M3)
            for x, factor in zip((q, k, v), factors, strict=True)
        )
    table = None
    if row.score == "relative":
        table = normal(s.hq, 2 * s.kv_len).requires_grad_(row.learned)
    score = score_of(row, table, device)
    return Inputs(row, q, k, v, score, mask_of(row, device), table, factors)


def score_of(row: Any, table: Tensor | None, device: Any) -> Any:
    """The score_mod of a call's or a plan's row, over this table where it is relative."""
    from flexattn import catalogue

    if row.score == "alibi":
        return catalogue.alibi(row.shape.hq, device)
    if row.score == "softcap":
        return catalogue.softcap(row.cap)
    return catalogue.relative_bias(table, row.shape.kv_len) if row.score == "relative" else None


def random_blocks(length: int, density: float, device: str = "cpu") -> Any:
    """Of every row of blocks, the same number of blocks, drawn anew for each row."""
    blocks = length // BLOCK
    draw = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(blocks, generator=draw) for _ in range(blocks)])
    table = (order < round(density * blocks)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[q_idx // BLOCK, kv_idx // BLOCK]

    return mask_mod


def mask_of(row: Row, device: str) -> Any:
    """The mask_mod of a row."""
    from flexattn import and_masks, catalogue

    keys = row.shape.kv_len
    if row.mask == "causal":
        return catalogue.causal
    if row.mask == "window":
        return catalogue.sliding_window(row.window)
    if row.mask == "documents":
        ends = torch.tensor([0, *row.documents], device=device).cumsum(0)
        return and_masks(catalogue.document(catalogue.document_ids(ends)), catalogue.causal)
    if row.mask == "blocks":
        return random_blocks(keys, row.density, device)
    if row.mask == "natten":
        width = 2 ** (keys.bit_length() // 2)
        return catalogue.natten_2d(keys // width, width, min(NATTEN, keys // width))
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, at: tuple[int, int], places: Tensor, score: Any, mask: Any,
    sink: Tensor | None = None, coarse: torch.dtype | None = None, e4m3_weights: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of some rows of a head, by the definition: q [n, D], k [S, D], v [S, Dv], float64.

    at: batch and head. places: positions of the rows. coarse: scores and weights are rounded to
    it, as a careful kernel rounds them; of float32 sums are, too. e4m3_weights: weights are
    rounded to e4m3 instead, the largest of each row as RAISED.
    """
    b, h = (torch.tensor(each, device=q.device) for each in at)
    rows, keys = places[:, None], torch.arange(len(k), device=q.device)
    if coarse is torch.float32:
        q, k, v = q.float(), k.float(), v.float()

    def rounded(x: Tensor) -> Tensor:
        return x if coarse is None else x.to(coarse).to(q.dtype)

    scores = rounded(q @ k.T) / math.sqrt(q.shape[-1])
    if score is not None:
        scores = rounded(score(scores, b, h, rows, keys).to(q.dtype))
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, rows, keys), -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(q.dtype).expand(len(q), 1)], 1)
    weights = scores.softmax(-1).nan_to_num(0.0)[:, : len(k)]  # a row without keys gives zeros
    if e4m3_weights:
        raised = RAISED / weights.amax(-1, keepdim=True).clamp_min(1e-30)
        return (weights * raised).float().to(E4M3).to(q.dtype) / raised @ v
    return rounded(weights) @ v


def off(name: str, got: Tensor, exact: Tensor, rounded: Tensor, rms_share: float = 2.0) -> str:
    """The errors of `got` beyond twice those of the rounded reference, plus one ulp, in words.

    That of the largest number and of the root mean square, each. rms_share: in place of twice.
    """
    if got.shape != exact.shape or not bool(got.isfinite().all()):
        return f"{name}: {tuple(got.shape)} of {tuple(exact.shape)}, or not finite; "
    ulp, dtype, found = torch.finfo(got.dtype).eps, got.dtype, ""
    for kind in ("max", "rms"):

        def size(x: Tensor, kind: str = kind) -> float:
            return float(x.abs().max() if kind == "max" else x.square().mean().sqrt())

        error, theirs = size(got.double() - exact), size(rounded.to(dtype).double() - exact)
        budget = (rms_share if kind == "rms" else 2) * theirs + ulp * size(exact)
        if not error <= budget:
            found += f"{name}: {kind} error {error:.3e}, budget {budget:.3e}; "
    return found


def check(out: Tensor, x: Inputs, e4m3_share: float | None = None) -> str:
    """The faults of an output, in words; "" where it has none.

    The rows at both ends and some between are looked at, of the first and the last head.
    e4m3_share: of a call that asked for weights in e4m3, the `rms_share` of such a reference.
    """
    eight = e4m3_share is not None
    share = 2.0 if e4m3_share is None else e4m3_share
    s, draw = x.row.shape, torch.Generator().manual_seed(0)
    rows = torch.arange(s.q_len)
    if s.q_len > CHECKED:
        third = CHECKED // 3
        rows = torch.cat([rows[:third], rows[-third:], torch.randperm(s.q_len, generator=draw)])
        rows = rows[:CHECKED].unique()
    rows, found, score = rows.to(out.device), "", _plain_score(x)
    for b, h in sorted({(0, 0), (s.batch - 1, s.hq - 1)}):
        q, k, v = x.wide(b, h)
        given = (q[rows], k, v, (b, h), rows, score, x.mask_mod)
        exact = attention(*given)
        rounded = attention(*given, coarse=x.dtype, e4m3_weights=eight)
        found += off(f"out[{b}, {h}]", out[b, h, rows], exact, rounded, share)
    return found


def _plain_score(x: Inputs) -> Any:
    return score_of(x.row, None if x.table is None else x.table.detach(), x.q.device)


def check_gradients(got: tuple[Tensor, ...], dout: Tensor, x: Inputs) -> str:
    """The faults of dq, dk, dv and of a learned table's gradient, in words.

    Of the first key head in the last batch; those of a table are summed over all batches.
    """
    exact, rounded = (_gradients(x, dout, each) for each in (None, x.dtype))
    heads = x.row.shape.hq // x.row.shape.hkv
    ours = [got[0][-1, :heads], got[1][-1, 0], got[2][-1, 0], *(g[:heads] for g in got[3:])]
    names = ("dq", "dk", "dv", "dtable")
    return "".join(off(*each) for each in zip(names, ours, exact, rounded, strict=False))


def _gradients(x: Inputs, dout: Tensor, coarse: torch.dtype | None) -> list[Tensor]:
    s = x.row.shape
    found: list[Tensor] = []
    heads = s.hq // s.hkv
    table = x.table.detach().double().requires_grad_() if x.learned else None
    score = _plain_score(x) if table is None else score_of(x.row, table, x.q.device)
    for b in range(0 if table is not None else s.batch - 1, s.batch):
        q = torch.stack([x.wide(b, h)[0] for h in range(heads)])
        leaves = [each.requires_grad_() for each in (q, *x.wide(b, 0)[1:])]
        for h in range(heads):
            for first in range(0, s.q_len, PIECE):
                rows = torch.arange(first, min(first + PIECE, s.q_len), device=x.q.device)
                with torch.enable_grad():
                    out = attention(
                        leaves[0][h, rows], leaves[1], leaves[2], (b, h), rows, score, x.mask_mod,
                        coarse=coarse,
                    )  # fmt: skip
                out.backward(dout[b, h, rows].to(out.dtype))
        found = [each.grad for each in leaves if each.grad is not None]
    return found if table is None or table.grad is None else [*found, table.grad[:heads]]
