"""Tensors of a serving row: a paged cache in random order, or a contiguous one, and its oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.serving_rows import WINDOWED, ServingRow
from bench.trees_calls import draft_tree
from bench.trees_plans import block_table
from flexattn.catalogue.masks import MaskMod, causal, sliding_window
from flexattn.catalogue.scores import ScoreMod, alibi, softcap
from flexattn.reference import Precision, Reference, attention
from flexattn.verify.gate import Verdict, judge

__all__ = ["DTYPES", "Served", "judge_requests", "make_served", "mods_of"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SCALE = 0.75  # of an eight-bit cache
JUDGED = 4  # requests


@dataclass(frozen=True)
class Served:
    """q [B, q_len, Hq, D]; K and V [pages, page, Hkv, D], or [B, keys, Hkv, D] for page 0.

    table int32 [B, pages of a request], None for page 0. scales: of K, and the same of V. keys(b):
    K and V of a request as they count, [keys, Hkv, D] in a float dtype.
    """

    row: ServingRow
    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    sinks: Tensor | None
    scales: Tensor | None

    def keys(self, b: int) -> tuple[Tensor, Tensor]:
        """K and V of request b."""
        n = self.row.lens[b]
        k, v = self.k, self.v
        if self.table is None:
            k, v = k[b], v[b]
        else:
            pages = self.table[b, : -(-n // self.row.page)].long()
            k, v = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
        if self.scales is not None:
            scales = self.scales
            if self.row.variant == "fp8-token-head":
                assert self.table is not None
                scales = scales[pages].flatten(0, 1)[..., None]
            k, v = k.float() * scales, v.float() * scales
        return k[:n], v[:n]


def make_served(row: ServingRow, device: str = "cuda") -> Served:
    """Normal random tensors, the same for a row's name on every run of one device type."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(row.name.encode()))
    eight, dtype = row.eight_bits, DTYPES[row.dtype]

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return made.to(torch.float8_e4m3fn) if eight and len(shape) == 4 else made

    batch, table = len(row.lens), None
    sizes = (batch, max(row.lens))
    if row.page:
        table, pages = block_table(row.lens, row.nodes, row.page)
        sizes = (pages, row.page)
        table = table.to(device)
    k = normal(*sizes, row.hkv, row.d)
    v = k[..., : row.dv] if row.variant == "mla" else normal(*sizes, row.hkv, row.dv)
    q = torch.randn(
        (batch, row.q_len, row.hq, row.d), generator=generator, device=device, dtype=dtype
    )
    lens = torch.tensor(row.lens, dtype=torch.int32, device=device)
    score_mod, mask_mod = mods_of(row, lens, device)
    sinks = torch.randn(row.hq, generator=generator, device=device)
    scales = torch.full((1,), SCALE, device=device)
    if row.variant == "fp8-token-head":
        scales = torch.rand(k.shape[:3], generator=generator, device=device) + SCALE
    return Served(
        row, q, k, v, lens, table, score_mod, mask_mod,
        sinks if row.variant == "sinks" else None, scales if eight else None,
    )  # fmt: skip


def judge_requests(out: Tensor, x: Served) -> Verdict:
    """Hold some requests of out [B, q_len, Hq, Dv] to the oracle, the first and last included."""
    count = len(x.row.lens)
    chosen = sorted({0, count - 1, *range(0, count, max(1, count // JUDGED))})
    found: list[tuple[Reference, Reference]] = []
    for b in chosen:
        exact, rounded = (_reference(x, b, each) for each in (Precision.ORACLE, Precision.ROUNDED))
        found.append((exact, rounded))
    exact, rounded = (torch.cat([pair[i].out for pair in found]) for i in (0, 1))
    lse = torch.cat([pair[0].lse for pair in found])
    got = out[torch.tensor(chosen, device=out.device)].transpose(1, 2)
    return judge((got, None, None), (exact, lse, None), (rounded, lse, None), out.dtype)


def _reference(x: Served, b: int, precision: Precision) -> Reference:
    k, v = (each.transpose(0, 1)[None] for each in x.keys(b))
    past = x.row.lens[b] - x.row.q_len
    q = x.q[b].transpose(0, 1)[None]
    score: Any = None
    if x.score_mod is not None or x.mask_mod is not None:

        def score(s: Tensor, i: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            if x.score_mod is not None:
                s = x.score_mod(s, i + b, h, m + past, n)
            if x.mask_mod is None:
                return s
            return torch.where(x.mask_mod(i + b, h, m + past, n), s, -torch.inf)

    found = attention(q, k, v, score_mod=score, precision=precision)
    if x.sinks is None:
        return found
    kept = torch.sigmoid(found.lse - x.sinks[:, None])
    return Reference((found.out * kept[..., None]).to(found.out.dtype), found.lse, found.lse)


def mods_of(row: ServingRow, lens: Tensor, device: str) -> tuple[ScoreMod | None, MaskMod | None]:
    """The row's score_mod and mask_mod; lens int32 [B] on the device."""
    scores: dict[str, Callable[[], ScoreMod]] = {
        "softcap": lambda: softcap(30.0),
        "alibi": lambda: alibi(row.hq, device),
    }
    if row.variant in scores:
        return scores[row.variant](), None
    if row.variant == "window":
        return None, sliding_window(max(row.lens) // WINDOWED - 1)
    if row.variant == "causal":
        return None, causal
    if row.variant != "tree":
        return None, None
    return None, draft_tree(row.q_len, lens - row.q_len, device)
