"""Tensors and mods of a row: the same callables go to ours, to torch and to the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from bench.rows import BLOCK, Row
from flexattn.catalogue.masks import MaskMod, causal, document, sliding_window
from flexattn.catalogue.scores import ScoreMod, alibi, relative_bias, softcap

__all__ = ["Inputs", "make", "random_blocks"]


@dataclass(frozen=True)
class Inputs:
    """What every candidate of a row is given."""

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None

    @property
    def gqa(self) -> bool:
        """Whether query heads share key heads."""
        return self.row.shape.hq != self.row.shape.hkv


def make(row: Row, device: str, dtype: torch.dtype) -> Inputs:
    """Normal random q, k and v, the same for a row's name on every run of one device type."""
    s = row.shape
    generator = torch.Generator(device).manual_seed(zlib.crc32(row.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return Inputs(
        row,
        normal(s.batch, s.hq, s.q_len, s.d),
        normal(s.batch, s.hkv, s.kv_len, s.d),
        normal(s.batch, s.hkv, s.kv_len, s.d),
        _score_mod(row, normal, device),
        _mask_mod(row, device),
    )


def _score_mod(row: Row, normal: Callable[..., Tensor], device: str) -> ScoreMod | None:
    if row.score == "alibi":
        return alibi(row.shape.hq, device)
    if row.score == "softcap":
        return softcap(row.cap)
    if row.score == "relative":
        return relative_bias(normal(row.shape.hq, 2 * row.shape.kv_len), row.shape.kv_len)
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
