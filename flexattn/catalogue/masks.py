"""Mask mods over positions, documents and lengths: factories, one idea each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

noop: MaskMod = noop_mask


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys up to the query's own position."""
    return q_idx >= kv_idx


def causal_offset(offset: int) -> MaskMod:
    """Causal where query 0 stands at position `offset`: S - L for new tokens after a cache."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    mask_mod.__name__ = f"causal_offset_{offset}"
    return mask_mod


def sliding_window(window: int) -> MaskMod:
    """The query's own key and the `window` keys before it."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    mask_mod.__name__ = f"sliding_window_{window}"
    return mask_mod


def dilated_window(window: int, dilation: int) -> MaskMod:
    """Keys at most `window` away on either side, every `dilation`-th of them."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance.abs() <= window) & (distance % dilation == 0)

    mask_mod.__name__ = f"dilated_window_{window}_{dilation}"
    return mask_mod


def prefix_lm(lengths: Tensor) -> MaskMod:
    """Causal, and the first `lengths[b]` keys for every query; lengths int [B]."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    mask_mod.__name__ = "prefix_lm"
    return mask_mod


def padding(lengths: Tensor) -> MaskMod:
    """The first `lengths[b]` keys; lengths int [B]."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    mask_mod.__name__ = "padding"
    return mask_mod


def document_ids(offsets: Tensor) -> Tensor:
    """The document of each packed row, int32 [offsets[-1]], as the document masks read it.

    offsets: int [documents + 1], where each begins and the last one ends, as cu_seqlens or the
    offsets of a jagged tensor; a document may be empty.
    """
    count = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    return count.repeat_interleave(offsets.diff())


def document(doc_ids: Tensor) -> MaskMod:
    """Keys of the query's own document; doc_ids int [max(L, S)]."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return doc_ids[q_idx] == doc_ids[kv_idx]

    mask_mod.__name__ = "document"
    return mask_mod


def document_offsets(doc_ids: Tensor, offsets: Tensor) -> MaskMod:
    """The same as an interval of keys; offsets int [documents + 1], as in cu_seqlens."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        doc = doc_ids[q_idx]
        return (offsets[doc] <= kv_idx) & (kv_idx < offsets[doc + 1])

    mask_mod.__name__ = "document_offsets"
    return mask_mod


def head_windows(windows: Tensor) -> MaskMod:
    """A causal window of its own for each query head; windows int [Hq]."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= windows[h])

    mask_mod.__name__ = "head_windows"
    return mask_mod


def checkerboard(cell: int) -> MaskMod:
    """Every other square of `cell` x `cell` lanes."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // cell + kv_idx // cell) % 2 == 0

    mask_mod.__name__ = f"checkerboard_{cell}"
    return mask_mod


def block_table(table: Tensor, size: int) -> MaskMod:
    """Blocks of `size` x `size` lanes listed in a bool table [B, Hq, q blocks, kv blocks]."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h, q_idx // size, kv_idx // size]

    mask_mod.__name__ = f"block_table_{size}"
    return mask_mod
