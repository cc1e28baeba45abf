"""Sparse attention of language models: MoBA, NSA, DSA and Quest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.lists import kept_tensors
from flexattn.catalogue.masks import sliding_window
from flexattn.errors import InputError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.selection import Selection
from flexattn.sparse.shared import of_query_heads, wide
from flexattn.util.locks import Lru

# Scores that are computed at a time.
_AT_ONCE = 2**26
# The masks of NSA's branches, two a length: at a million tokens one takes half a gigabyte.
_masks: Lru[tuple[Any, ...], Any] = Lru(8)


def moba(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    unit: int = 512,
    k: int = 3,
    scale: float | None = None,
) -> Tensor:
    """Mixture of block attention: each row and query head reads k blocks of `unit` keys, causal.

    query [B, Hq, L, E], key [B, Hkv, L, E], value [B, Hkv, L, Ev]. A block's score is the product
    of the query and the mean of the block's keys; the row's own block is one of the k.

    Source: Lu et al., MoBA, 2025, arXiv:2502.13189.
    """
    _check_length(query, key.shape[2])
    with torch.no_grad():
        pad = -key.shape[2] % unit  # of the last block, whose own rows alone may read it
        padded = torch.nn.functional.pad(wide(key), (0, 0, 0, pad))
        means = padded.unflatten(2, (-1, unit)).mean(3)
        scores = wide(query) @ of_query_heads(means, query).mT
        row, at = _positions(query, scores.shape[3])
        scores = scores.masked_fill(at == row // unit, torch.inf)
    chosen = Selection.from_topk(scores, k, unit=unit, causal=True)
    return _attend(query, key, value, chosen, scale)


def nsa(
    query: Tensor,
    compressed: tuple[Tensor, Tensor],
    selected: tuple[Tensor, Tensor],
    recent: tuple[Tensor, Tensor],
    gates: Tensor,
    *,
    length: int = 32,
    stride: int = 16,
    unit: int = 64,
    k: int = 16,
    first: int = 1,
    last: int = 2,
    window: int = 512,
    scale: float | None = None,
) -> Tensor:
    """Native sparse attention: the sum of three branches, each times its gate, causal.

    query [B, Hq, L, E]. Each branch has key and value. `selected` and `recent` [B, Hkv, L, E].
    `compressed` [B, Hkv, n, E]: block i is what the model's network makes of the `length` keys
    from i * `stride` on. gates [B, Hq, L, 3], by branch in this order.
    A row reads the compressed blocks that end at it or before. Their weights, summed over the
    query heads of a key head, score the blocks of `unit` keys. The score of a block of `unit` keys
    adds up its parts of `stride` keys. Each part counts the weights of all compressed blocks that
    contain it. The row reads the k best; the `first` blocks and the `last` ones up to its own are
    among them. It also reads its last `window` keys.

    Source: Yuan et al., Native Sparse Attention, 2025, arXiv:2502.11089.
    """
    if unit % stride or length % stride:
        raise InputError(
            f"unit {unit} and length {length} with a stride of {stride}",
            "they are multiples of the stride",
        )
    for branch in (selected, recent):
        _check_length(query, branch[0].shape[2])
    L, n, where = query.shape[2], compressed[0].shape[2], query.device
    ended = _kept(_ended, where, L, n, length, stride)
    coarse, lse = flex_attention(query, *compressed, None, ended, scale, True, return_lse=True)
    with torch.no_grad():
        scores = _importance(query, compressed[0], lse, (length, stride, unit), scale)
        row, at = _positions(query, scores.shape[3])
        fixed = (at < first) | ((at > row // unit - last) & (at <= row // unit))
        scores = scores.masked_fill(fixed, torch.inf)
    chosen = Selection.from_topk(scores, k, unit=unit, causal=True)
    fine = _attend(query, *selected, chosen, scale)
    near = _attend(query, *recent, _kept(_window, where, L, window), scale)
    of_coarse, of_fine, of_near = gates[..., None].unbind(3)
    return of_coarse * coarse + of_fine * fine + of_near * near


def dsa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    *,
    k: int = 2048,
    scale: float | None = None,
) -> Tensor:
    """DeepSeek's sparse attention: each row reads the k keys that an indexer scores best, causal.

    query [B, Hq, L, E], key [B, Hkv, L, E], value [B, Hkv, L, Ev]; all heads of a row read the
    same keys. The last three arguments are those of `indexer_scores`. The indexer learns through a
    loss on its scores, not through this function.

    Source: DeepSeek-AI, DeepSeek-V3.2-Exp, 2025.
    """
    for keys in (key.shape[2], index_key.shape[1]):
        _check_length(query, keys)
    # The indexer's products, before the sum over its heads.
    row = index_query.shape[0] * index_query.shape[1] * index_key.shape[1]
    rows = max(1, _AT_ONCE // max(1, row))
    with torch.no_grad():
        parts = zip(index_query.split(rows, 2), weights.split(rows, 1), strict=True)
        scores = torch.cat([indexer_scores(some, index_key, w) for some, w in parts], 2)
    chosen = Selection.from_topk(scores, k, unit=1, causal=True)
    return _attend(query, key, value, chosen, scale)


def indexer_scores(index_query: Tensor, index_key: Tensor, weights: Tensor) -> Tensor:
    """The lightning indexer's score [B, 1, L, S] of each key, for a row; with gradients.

    index_query [B, heads, L, D], index_key [B, S, D], weights [B, L, heads]: the products'
    positive parts, summed over the heads by their weights.
    """
    products = (wide(index_query) @ wide(index_key)[:, None].mT).relu()
    return (wide(weights).mT[..., None] * products).sum(1, keepdim=True)


def quest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    page: int = 16,
    k: int = 64,
    scale: float | None = None,
) -> Tensor:
    """Quest, for a decode step: the query row of each head reads the k pages that may matter most.

    query [B, Hq, 1, E], key [B, Hkv, S, E], value [B, Hkv, S, Ev]. page: Quest's word for `unit`.
    A page's score bounds the product of the query and any key of the page. It follows from the
    least and the greatest value of each column.

    Source: Tang et al., Quest, 2024, arXiv:2406.10774.
    """
    if query.shape[2] != 1:
        raise InputError(
            f"query has {query.shape[2]} rows",
            "quest is for one step of decoding: each head's row chooses its pages",
        )
    with torch.no_grad():
        # The last key again, where it ends within a page.
        at = torch.arange(-(-key.shape[2] // page) * page, device=key.device)
        pages = wide(key)[:, :, at.clamp(max=key.shape[2] - 1)].unflatten(2, (-1, page))
        low, high = (of_query_heads(x, query).mT for x in torch.aminmax(pages, dim=3))
        row = wide(query)
        scores = row.clamp(min=0) @ high + row.clamp(max=0) @ low
    # A block of 16 rows, of which there is one: kernels walk pages of multiples of 16 keys.
    chosen = Selection.from_topk(scores, k, unit=page, rows=16)
    return _attend(query, key, value, chosen, scale)


def _importance(
    query: Tensor, key: Tensor, lse: Tensor, sizes: tuple[int, int, int], scale: float | None
) -> Tensor:
    """Scores [B, Hkv, L, units] by the weights of compressed keys; sizes: length, stride, unit."""
    (B, Hq, L, E), (_, Hkv, n, _), (length, stride, unit) = query.shape, key.shape, sizes
    keys, units, each = of_query_heads(wide(key), query).mT, -(-L // unit), unit // stride
    found = keys.new_empty(B, Hkv, L, units)
    ends = torch.arange(n, device=key.device) * stride + length
    rows = max(1, _AT_ONCE // max(1, B * Hq * n))
    for start in range(0, L, rows):
        some = slice(start, start + rows)
        scores = wide(query[:, :, some]) @ keys * (1 / math.sqrt(E) if scale is None else scale)
        seen = ends <= torch.arange(L, device=key.device)[some, None] + 1
        p = (scores - lse[:, :, some, None]).exp().where(seen, 0.0).unflatten(1, (Hkv, -1)).sum(2)
        parts = p.new_zeros(*p.shape[:3], units * each)
        for j in range(min(length // stride, units * each)):
            # Part i + j belongs to block i. A block with a part past the rows was seen by none.
            has = p[..., : units * each - j]
            parts[..., j : j + has.shape[3]] += has
        found[:, :, some] = parts.unflatten(3, (units, each)).sum(4)
    return found


def _check_length(query: Tensor, keys: int) -> None:
    if keys != query.shape[2]:
        raise InputError(
            f"{query.shape[2]} query rows and {keys} keys",
            "row i is at key i: there are as many keys as rows",
            "pass whole sequences; `quest` is for one step of decoding",
        )


def _kept(
    make: Callable[..., tuple[BlockMask, Tensor]], device: torch.device, *sizes: int
) -> BlockMask:
    """The mask of make(*sizes, device), as kept_tensors keeps it."""
    if torch.compiler.is_dynamo_compiling():
        return make(*sizes, device)[0]
    return kept_tensors(make, sizes, device, _masks)[0]


def _ended(
    L: int, n: int, length: int, stride: int, where: torch.device
) -> tuple[BlockMask, Tensor]:
    """The mask of blocks of `length` keys, a stride apart, that end at a row or before."""

    def ended(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx * stride + length <= q_idx + 1

    return _with_a_list(create_block_mask(ended, None, None, L, n, where))


def _window(L: int, window: int, where: torch.device) -> tuple[BlockMask, Tensor]:
    mask_mod = sliding_window(window - 1)
    return _with_a_list(create_block_mask(mask_mod, None, None, L, L, where))


def _with_a_list(mask: BlockMask) -> tuple[BlockMask, Tensor]:
    """The class of a list tells kept_tensors whether others may have the mask."""
    return mask, mask.kv_indices


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | Selection, scale: float | None
) -> Tensor:
    return flex_attention(query, key, value, None, mask, scale, True)


def _positions(query: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Rows [L, 1] and units [units]."""
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    return row, torch.arange(units, device=query.device)
