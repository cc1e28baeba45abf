"""Mask mods over positions, documents and lengths: factories, one idea each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from flexattn.mods.signatures import MaskMod as MaskMod  # flexattn.cli.workloads imports it here

noop: MaskMod = noop_mask


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys up to the query's own position.

    What a decoder's self-attention sees. Blocks above the diagonal are never visited, and only
    those on it are masked.

        mask_mod = causal

    Source: Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.
    """
    return q_idx >= kv_idx


def causal_offset(offset: int) -> MaskMod:
    """Causal where query 0 stands at position `offset`: S - L for new tokens after a cache.

    A chunk of prefill, or a few tokens that are decoded at once, attends to a cache of S keys
    whose last L are its own.

        mask_mod = causal_offset(1536)

    Source: Agrawal et al., SARATHI (chunked prefill), 2023, arXiv:2308.16369.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    mask_mod.__name__ = f"causal_offset_{offset}"
    return mask_mod


def sliding_window(window: int) -> MaskMod:
    """The query's own key and the `window` keys before it.

    The work grows with the window instead of the length: tiles outside of the band are not
    visited. Mistral's and Gemma's local layers use it.

        mask_mod = sliding_window(512)

    Source: Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    mask_mod.__name__ = f"sliding_window_{window}"
    return mask_mod


def dilated_window(window: int, dilation: int) -> MaskMod:
    """Keys at most `window` away on either side, every `dilation`-th of them.

    A band with gaps reaches further for the same number of keys. Every block of the band holds
    some keys, so kernels mask it element by element.

        mask_mod = dilated_window(512, 128)

    Source: Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance.abs() <= window) & (distance % dilation == 0)

    mask_mod.__name__ = f"dilated_window_{window}_{dilation}"
    return mask_mod


def prefix_lm(lengths: Tensor) -> MaskMod:
    """Causal, and the first `lengths[b]` keys for every query; lengths int [B].

    A prompt that sees all of itself, followed by a continuation that is causal. The prefix's
    length is read when the kernel runs, so one kernel serves every batch.

        mask_mod = prefix_lm(torch.tensor([700]))

    Source: Raffel et al., T5, 2019, arXiv:1910.10683.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    mask_mod.__name__ = "prefix_lm"
    return mask_mod


def padding(lengths: Tensor) -> MaskMod:
    """The first `lengths[b]` keys; lengths int [B].

    A batch of unequal lengths in one padded tensor. A sequence costs what it is long, not what
    its padding is, and its length may change in place between calls.

        mask_mod = padding(torch.tensor([1300]))

    Source: Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.
    """

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
    """Keys of the query's own document; doc_ids int [max(L, S)].

    Documents are packed into one row without padding, and none sees another. Join it with
    `causal` by torch's `and_masks` to train on packed text.

        mask_mod = document(document_ids(torch.tensor([0, 420, 1100, 1300, 2048])))

    Source: Krell et al., Efficient Sequence Packing, 2021, arXiv:2107.02027.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return doc_ids[q_idx] == doc_ids[kv_idx]

    mask_mod.__name__ = "document"
    return mask_mod


def document_offsets(doc_ids: Tensor, offsets: Tensor) -> MaskMod:
    """The same as an interval of keys; offsets int [documents + 1], as in cu_seqlens.

    An interval tells a kernel where a row's keys end before it reads any of them, while
    `document` lets it find out.

        offsets = torch.tensor([0, 420, 1100, 1300, 2048])
        mask_mod = document_offsets(document_ids(offsets), offsets)

    Source: Dao, FlashAttention-2 (cu_seqlens), 2023, arXiv:2307.08691.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        doc = doc_ids[q_idx]
        return (offsets[doc] <= kv_idx) & (kv_idx < offsets[doc + 1])

    mask_mod.__name__ = "document_offsets"
    return mask_mod


def head_windows(windows: Tensor) -> MaskMod:
    """A causal window of its own for each query head; windows int [Hq].

    Some heads look near and some far. The block mask then has an entry for each head.

        mask_mod = head_windows(torch.tensor([128, 256, 512, 1024]))

    Source: Sukhbaatar et al., Adaptive Attention Span, 2019, arXiv:1905.07799.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= windows[h])

    mask_mod.__name__ = "head_windows"
    return mask_mod


def block_table(table: Tensor, size: int) -> MaskMod:
    """Blocks of `size` x `size` lanes listed in a bool table [B, Hq, q blocks, kv blocks].

    Whatever chose the blocks, by chance or by content, kernels visit those that are listed.

        chosen = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.2
        mask_mod = block_table(chosen | torch.eye(16, dtype=torch.bool), 128)

    Source: Zaheer et al., Big Bird, 2020, arXiv:2007.14062.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h, q_idx // size, kv_idx // size]

    mask_mod.__name__ = f"block_table_{size}"
    return mask_mod
