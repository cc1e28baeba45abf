"""Mask mods over positions, documents, lengths and structure: factories, one idea each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from flexattn.mods.expr import MaskMod as MaskMod  # flexattn.cli.workloads imports it here

noop: MaskMod = noop_mask


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees the keys up to its own position.

    This is the self-attention of a decoder. Kernels skip blocks above the diagonal, and mask
    only blocks on it.

        mask_mod = causal

    Source: Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.
    """
    return q_idx >= kv_idx


def causal_offset(offset: int) -> MaskMod:
    """Causal, with query 0 at position `offset`.

    Use S - L for L new tokens at the end of a cache of S keys: a chunk of prefill, or a few
    tokens that are decoded at once.

        mask_mod = causal_offset(1536)

    Source: Agrawal et al., SARATHI (chunked prefill), 2023, arXiv:2308.16369.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    mask_mod.__name__ = f"causal_offset_{offset}"
    return mask_mod


def sliding_window(window: int) -> MaskMod:
    """A query sees its own key and the `window` keys before it.

    The work grows with the window instead of the length, because kernels skip tiles outside of
    the band. Mistral's and Gemma's local layers use it.

        mask_mod = sliding_window(512)

    Source: Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    mask_mod.__name__ = f"sliding_window_{window}"
    return mask_mod


def dilated_window(window: int, dilation: int) -> MaskMod:
    """A query sees every `dilation`-th key that is at most `window` away.

    A band with gaps reaches further with the same number of keys. Every block of the band
    keeps some keys, so kernels mask each element.

        mask_mod = dilated_window(512, 128)

    Source: Beltagy et al., Longformer, 2020, arXiv:2004.05150.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance.abs() <= window) & (distance % dilation == 0)

    mask_mod.__name__ = f"dilated_window_{window}_{dilation}"
    return mask_mod


def prefix_lm(lengths: Tensor) -> MaskMod:
    """Causal, except that all see the first `lengths[b]` keys; lengths int [B].

    A prompt sees all of itself, and its continuation is causal. The kernel reads the prefix's
    length when it runs, so one kernel computes every batch.

        mask_mod = prefix_lm(torch.tensor([700]))

    Source: Raffel et al., T5, 2019, arXiv:1910.10683.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    mask_mod.__name__ = "prefix_lm"
    return mask_mod


def padding(lengths: Tensor) -> MaskMod:
    """Every query sees the first `lengths[b]` keys; lengths int [B].

    The batch has sequences of unequal lengths in one padded tensor. The work follows the
    length of a sequence and not its padding. You may change lengths in place between calls.

        mask_mod = padding(torch.tensor([1300]))

    Source: Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    mask_mod.__name__ = "padding"
    return mask_mod


def document_ids(offsets: Tensor, rows: int | None = None) -> Tensor:
    """The document of each packed row, int32 [rows], as the document masks read it.

    offsets: int [documents + 1], where each begins and the last one ends, as cu_seqlens or the
    offsets of a jagged tensor; a document may be empty. rows: offsets[-1], for which None waits
    for the device, or more: rows behind the last document are of one more.
    """
    if rows is not None:
        row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
        # Ends that are at most a row, counted in a tensor of their own: of a view, Inductor of
        # torch 2.11 searches from the beginning of its memory.
        return torch.searchsorted(offsets[1:] - 1, row, out_int32=True)
    count = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    return count.repeat_interleave(offsets.diff())


def document(doc_ids: Tensor, key_ids: Tensor | None = None) -> MaskMod:
    """A query sees the keys of its own document; doc_ids int [max(L, S)].

    Documents are packed into one row without padding, and none sees another. If keys have
    other ids, pass doc_ids [L] and key_ids int [S]. To train on packed text, join it with
    `causal` by torch's `and_masks`.

        mask_mod = document(document_ids(torch.tensor([0, 420, 1100, 1300, 2048])))

    Source: Krell et al., Efficient Sequence Packing, 2021, arXiv:2107.02027.
    """
    # One tensor where there can be one: a kernel that compares a table with itself reads less.
    of_keys = doc_ids if key_ids is None else key_ids

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return doc_ids[q_idx] == of_keys[kv_idx]

    mask_mod.__name__ = "document"
    return mask_mod


def document_offsets(doc_ids: Tensor, offsets: Tensor) -> MaskMod:
    """The same by the ends of documents; offsets int [documents + 1], as cu_seqlens.

    From offsets a kernel knows where a row's keys end before it reads any of them. From the
    ids of `document` it must find out.

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
    """A causal window for each query head; windows int [Hq].

    Some heads look near and some look far. The block mask then has a list for each head.

        mask_mod = head_windows(torch.tensor([128, 256, 512, 1024]))

    Source: Sukhbaatar et al., Adaptive Attention Span, 2019, arXiv:1905.07799.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= windows[h])

    mask_mod.__name__ = "head_windows"
    return mask_mod


def block_table(table: Tensor, size: int) -> MaskMod:
    """A query sees the blocks of `size` x `size` that a bool table lists.

    The table is [B, Hq, q blocks, kv blocks]. You may choose the blocks in any way. Kernels
    visit only the listed ones.

        chosen = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.2
        mask_mod = block_table(chosen | torch.eye(16, dtype=torch.bool), 128)

    Source: Zaheer et al., Big Bird, 2020, arXiv:2007.14062.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h, q_idx // size, kv_idx // size]

    mask_mod.__name__ = f"block_table_{size}"
    return mask_mod


def natten_2d(height: int, width: int, window: int) -> MaskMod:
    """Neighbourhood attention: a query pixel sees a square of `window` pixels.

    At the edge of the canvas the square moves inwards, so every pixel sees window x window
    keys. Pixels run row by row. So a square is a stripe in each of `window` rows.

        mask_mod = natten_2d(45, 45, 13)

    Source: Hassani et al., Neighborhood Attention Transformer, 2022, arXiv:2204.07143.
    """
    radius = window // 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = (q_idx // width).clamp(radius, height - 1 - radius)
        col = (q_idx % width).clamp(radius, width - 1 - radius)
        near_row = (row - kv_idx // width).abs() <= radius
        near_col = (col - kv_idx % width).abs() <= radius
        return near_row & near_col

    mask_mod.__name__ = f"natten_2d_{height}x{width}_{window}"
    return mask_mod


def sliding_tile_3d(
    canvas: tuple[int, int, int], tile: tuple[int, int, int], window: tuple[int, int, int]
) -> MaskMod:
    """Sliding tile attention over a video: a query sees whole tiles around its own.

    Canvas and tile are given in frames, rows and columns, and the window in tiles. Tokens run
    row by row. If you put tokens in the order of their tiles, whole tiles are whole blocks.

        mask_mod = sliding_tile_3d((8, 16, 16), (2, 4, 4), (3, 3, 3))

    Source: Zhang et al., Sliding Tile Attention, 2025, arXiv:2502.04507.
    """
    frames, rows, cols = canvas
    tiles = [-(-length // t) for length, t in zip(canvas, tile, strict=True)]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_at = (q_idx // (rows * cols), q_idx // cols % rows, q_idx % cols)
        kv_at = (kv_idx // (rows * cols), kv_idx // cols % rows, kv_idx % cols)
        inside = q_idx >= 0
        for axis in range(3):
            left = window[axis] // 2
            right = window[axis] - 1 - left
            centre = (q_at[axis] // tile[axis]).clamp(left, tiles[axis] - 1 - right)
            key = kv_at[axis] // tile[axis]
            inside = inside & (centre - left <= key) & (key <= centre + right)
        return inside

    mask_mod.__name__ = f"sliding_tile_3d_{frames}x{rows}x{cols}"
    return mask_mod


def flamingo(image_of: Tensor, first: Tensor, last: Tensor) -> MaskMod:
    """Text queries see an image from text position `first` up to before `last`.

    image_of int [S] is the image of each key, and first and last are int [images]. Text before
    the first image sees no key, so its rows are zeros.

        image_of = torch.arange(2048) // 512
        mask_mod = flamingo(image_of, torch.tensor([100, 600, 1100, 1500]),
                            torch.tensor([600, 1100, 1500, 2048]))

    Source: Alayrac et al., Flamingo, 2022, arXiv:2204.14198.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = image_of[kv_idx]
        return (first[image] <= q_idx) & (q_idx < last[image])

    mask_mod.__name__ = "flamingo"
    return mask_mod


def transfusion(image_ids: Tensor) -> MaskMod:
    """Causal text, and images that see all of themselves; image_ids int [max(L, S)].

    The id of text is -1. One model predicts the next token of text, and removes noise from
    whole images between text.

        image_ids = torch.full((2048,), -1)
        image_ids[300:812], image_ids[1200:1712] = 0, 1
        mask_mod = transfusion(image_ids)

    Source: Zhou et al., Transfusion, 2024, arXiv:2408.11039.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        image = image_ids[q_idx]
        same = (image >= 0) & (image == image_ids[kv_idx])
        return (q_idx >= kv_idx) | same

    mask_mod.__name__ = "transfusion"
    return mask_mod


def tree(ancestors: Tensor, context: int) -> MaskMod:
    """Speculative decoding: a draft token sees the context and its own ancestors.

    ancestors bool [L, L] is True at [i, j] if draft token j is i or an ancestor of i. The
    first `context` keys are the context. A model verifies all branches of a draft in one call.

        parent = [0, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 8, 9, 9, 11, 12]
        ancestors = torch.eye(16, dtype=torch.bool)
        for node in range(1, 16):
            ancestors[node] |= ancestors[parent[node]]
        mask_mod = tree(ancestors, 16)

    Source: Miao et al., SpecInfer, 2023, arXiv:2305.09781.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = torch.clamp(kv_idx - context, min=0)
        return (kv_idx < context) | ancestors[q_idx, node]

    mask_mod.__name__ = "tree"
    return mask_mod
