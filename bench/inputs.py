"""Tensors and mods of a row: the same callables go to ours, to torch and to the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from bench.rows import BLOCK, Row
from flexattn.catalogue.masks import MaskMod, causal, document, sliding_window
from flexattn.catalogue.scores import ScoreMod, alibi, relative_bias, softcap
from flexattn.problem.inputs import NO_DESCALES, Descales, descaled

__all__ = ["Inputs", "make", "random_blocks"]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True)
class Inputs:
    """What every candidate of a row is given."""

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    descales: Descales = NO_DESCALES

    @property
    def gqa(self) -> bool:
        """Whether query heads share key heads."""
        return self.row.shape.hq != self.row.shape.hkv

    @property
    def factors(self) -> dict[str, Tensor]:
        """The descales by the names that flex_attention has for them."""
        named = zip(self.descales._fields, self.descales, strict=True)
        return {f"{name}_descale": x for name, x in named if x is not None}

    def in_bfloat16(self) -> Inputs:
        """The same numbers, as far as bfloat16 holds them, with no factors."""
        q, k, v = (
            descaled(x.float(), factor).bfloat16()
            for x, factor in zip((self.q, self.k, self.v), self.descales, strict=True)
        )
        return replace(self, q=q, k=k, v=v, descales=NO_DESCALES)


def make(row: Row, device: str, dtype: torch.dtype) -> Inputs:
    """Normal random q, k and v, the same for a row's name on every run of one device type."""
    s = row.shape
    dtype = getattr(torch, row.dtype) if row.dtype else dtype
    generator = torch.Generator(device).manual_seed(zlib.crc32(row.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = normal(s.batch, s.hq, s.q_len, s.d)
    k, v = (normal(s.batch, s.hkv, s.kv_len, d) for d in (s.d, row.dv or s.d))
    descales = NO_DESCALES
    if row.fp8:
        descales = Descales(*(x.float().abs().amax((2, 3)) / LARGEST for x in (q, k, v)))
        q, k, v = (
            (x / factor[..., None, None]).to(E4M3)
            for x, factor in zip((q, k, v), descales, strict=True)
            if factor is not None
        )
    return Inputs(row, q, k, v, _score_mod(row, normal, device), _mask_mod(row, device), descales)


def _score_mod(row: Row, normal: Callable[..., Tensor], device: str) -> ScoreMod | None:
    if row.score == "alibi":
        return alibi(row.shape.hq, device)
    if row.score == "softcap":
        return softcap(row.cap)
    if row.score == "relative":
        table = normal(row.shape.hq, 2 * row.shape.kv_len).requires_grad_(row.learned)
        return relative_bias(table, row.shape.kv_len)
    return None


def random_blocks(length: int, density: float, device: str = "cpu") -> MaskMod:
    """Of every row of blocks, the same number of blocks, drawn anew for each row."""
    blocks = length // BLOCK
    draw = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(blocks, generator=draw) for _ in range(blocks)])
    table = (order < round(density * blocks)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[q_idx // BLOCK, kv_idx // BLOCK]

    return mask_mod


def _mask_mod(row: Row, device: str) -> MaskMod | None:
    if row.mask == "causal":
        return causal
    if row.mask == "window":
        return sliding_window(row.window)
    if row.mask == "documents":
        lengths = torch.tensor(row.documents, device=device)
        ids = torch.arange(len(lengths), device=device, dtype=torch.int32)
        return and_masks(document(ids.repeat_interleave(lengths)), causal)
    if row.mask == "blocks":
        return random_blocks(row.shape.kv_len, row.density, device)
    return None
