"""Mods of serving, video and training for the presets: factories over sizes, not over tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue.masks import causal, document, padding
from flexattn.catalogue.scores import t5_bias
from flexattn.mods.expr import MaskMod, ScoreMod

# Of eight packed documents, in parts of 8192; real lengths do not end where blocks do.
DOCUMENTS = (311, 1777, 640, 2048, 129, 1500, 1024, 763)


def ragged(B: int, kv_len: int) -> MaskMod:
    """A padded batch: sequence b has its first lengths[b] keys, from a quarter of them to all.

    lengths int32 [B] is read at run time, so one kernel serves every step.
    """
    lengths = torch.linspace(kv_len / 4, kv_len, B, dtype=torch.float64).ceil().to(torch.int32)
    mask_mod = padding(lengths)
    mask_mod.__name__ = f"ragged_{B}x{kv_len}"
    return mask_mod


def last_keys(window: int, B: int, kv_len: int) -> MaskMod:
    """Decode of a layer with a window: the last `window` keys of each sequence of kv_len keys.

    The window counts the query's own key. lengths int32 [B] is read at run time.
    """
    lengths = torch.full((B,), kv_len, dtype=torch.int32)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        end = lengths[b]
        return (kv_idx < end) & (kv_idx >= end - window)

    mask_mod.__name__ = f"last_{window}_keys"
    return mask_mod


def sliding_tiles(
    canvas: tuple[int, int, int], tokens: int, window: tuple[int, int, int]
) -> MaskMod:
    """Sliding tile attention where each tile's tokens lie together: every block is all or nothing.

    canvas and window in tiles (frames, rows, columns); `tokens` of one tile. At the canvas's edge
    the window moves inwards, so that every query has as many keys.
    """
    _, rows, cols = canvas

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_tile, kv_tile = q_idx // tokens, kv_idx // tokens
        q_at = (q_tile // (rows * cols), q_tile // cols % rows, q_tile % cols)
        kv_at = (kv_tile // (rows * cols), kv_tile // cols % rows, kv_tile % cols)
        inside = q_idx >= 0
        for axis in range(3):
            left = window[axis] // 2
            right = window[axis] - 1 - left
            centre = q_at[axis].clamp(left, canvas[axis] - 1 - right)
            inside = inside & (centre - left <= kv_at[axis]) & (kv_at[axis] <= centre + right)
        return inside

    mask_mod.__name__ = f"sliding_tiles_{'x'.join(map(str, canvas))}"
    return mask_mod


def packed(length: int) -> MaskMod:
    """Causal attention inside each of eight documents that fill a sequence."""
    share = torch.tensor(DOCUMENTS).cumsum(0) * length // sum(DOCUMENTS)
    ids = torch.searchsorted(share, torch.arange(length), right=True).to(torch.int32)
    mask_mod = and_masks(document(ids), causal)
    mask_mod.__name__ = f"packed_{length}"
    return mask_mod


def beside(window: int) -> MaskMod:
    """Keys up to `window` positions away on either side, as encoders' local layers have them."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() <= window

    mask_mod.__name__ = f"beside_{window}"
    return mask_mod


def learned_t5_bias(Hq: int) -> ScoreMod:
    """T5's bidirectional buckets, whose table [32, Hq] is trained: it requires a gradient."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(32, Hq, generator=draw).requires_grad_()
    return t5_bias(table, 128)
