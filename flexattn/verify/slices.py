"""The gate for shapes too large for a float64 oracle: some rows stand for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexattn.mods.signatures import MaskMod, ScoreMod
from flexattn.problem import out_dtype
from flexattn.problem.descales import NO_DESCALES, Descales
from flexattn.reference import Precision, Reference, attention
from flexattn.verify.gate import NAMES, Triple, Verdict, badness, judge

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
    """What the oracle and the reference run say of some rows, computed once to judge many runs.

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
