"""Sparse attention of language models: MoBA, NSA, DSA and Quest."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.create import create_block_mask
from flexattn.block_mask.lists import queue_of
from flexattn.catalogue.masks import sliding_window
from flexattn.errors import InputError
from flexattn.frontend.attention import flex_attention
from flexattn.frontend.selection import Selection

# It returns what it is asked for, which types do not tell.
_attention: Any = flex_attention
# Scores that are computed at a time.
_AT_ONCE = 2**26


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
    with torch.no_grad():
        pad = -key.shape[2] % unit  # of the last block, whose own rows alone may read it
        padded = torch.nn.functional.pad(_wide(key), (0, 0, 0, pad))
        means = padded.unflatten(2, (-1, unit)).mean(3)
        scores = _wide(query) @ _of_query_heads(means, query).mT
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

    query [B, Hq, L, E]; key and value of each branch: `selected` and `recent` [B, Hkv, L, E], and
    `compressed` [B, Hkv, n, E], what the model's own network makes of each `length` keys that
    begin at a multiple of `stride`. gates [B, Hq, L, 3], by branch in this order.
    A row reads the compressed blocks that end at it or before. Their weights, summed over the
    query heads of a key head, score the blocks of `unit` keys: each is the sum over its parts of
    `stride` keys, and over the compressed blocks that have the part. The row reads the k best;
    the `first` blocks and the `last` ones up to its own are among them. It also reads its last
    `window` keys.

    Source: Yuan et al., Native Sparse Attention, 2025, arXiv:2502.11089.
    """
    if unit % stride or length % stride:
        raise InputError(
            f"unit {unit} and length {length} with a stride of {stride}",
            "they are multiples of the stride",
        )
    L, n, where = query.shape[2], compressed[0].shape[2], query.device
    ended = _kept(_ended, where, L, n, length, stride)
    coarse, lse = _attention(query, *compressed, None, ended, scale, True, return_lse=True)
    with torch.no_grad():
        part = torch.arange(n, device=where)[:, None]
        part = part + torch.arange(length // stride, device=where)
        units = torch.arange(-(-L // unit), device=where)
        shares = (part[..., None] * stride // unit == units).sum(1)
        row, at = _positions(query, len(units))
        scores = _importance(query, compressed[0], lse, shares, (length, stride), scale)
        fixed = (at < first) | ((at > row // unit - last) & (at <= row // unit))
        scores = scores.masked_fill(fixed, torch.inf)
    chosen = Selection.from_topk(scores, k, unit=unit, causal=True)
    fine = _attend(query, *selected, chosen, scale)
    near = _attend(query, *recent, _kept(_window, where, L, window), scale)
    of_coarse, of_fine, of_near = gates[..., None].unbind(3)
    found: Tensor = of_coarse * coarse + of_fine * fine + of_near * near
    return found


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
    same keys. The others as in `indexer_scores`, by a loss of which the indexer learns.

    Source: DeepSeek-AI, DeepSeek-V3.2-Exp, 2025.
    """
    rows = max(1, _AT_ONCE // max(1, index_query[:, :, 0].numel() * index_key.shape[1]))
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
    products = (_wide(index_query) @ _wide(index_key)[:, None].mT).relu()
    return (_wide(weights).mT[..., None] * products).sum(1, keepdim=True)


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

    query [B, Hq, 1, E], key [B, Hkv, S, E], value [B, Hkv, S, Ev]. A page's score is the most that
    the product of the query and a key can be whose elements lie between the least and the
    greatest of the page.

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
        pages = _wide(key)[:, :, at.clamp(max=key.shape[2] - 1)].unflatten(2, (-1, page))
        low, high = (_of_query_heads(x, query).mT for x in torch.aminmax(pages, dim=3))
        wide = _wide(query)
        scores = wide.clamp(min=0) @ high + wide.clamp(max=0) @ low
    # A block of 16 rows, of which there is one: kernels walk pages of multiples of 16 keys.
    chosen = Selection.from_topk(scores, k, unit=page, rows=16)
    return _attend(query, key, value, chosen, scale)


def _importance(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    shares: Tensor,
    block: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Scores [B, Hkv, L, units] by the weights of compressed keys; shares [n, units]: of each."""
    (_, Hq, L, E), (_, Hkv, n, _), (length, stride) = query.shape, key.shape, block
    keys, found = _of_query_heads(_wide(key), query).mT, []
    ends = torch.arange(n, device=key.device) * stride + length
    rows = max(1, _AT_ONCE // max(1, query.shape[0] * Hq * n))
    for start in range(0, L, rows):
        some = slice(start, start + rows)
        scores = _wide(query[:, :, some]) @ keys * (1 / math.sqrt(E) if scale is None else scale)
        seen = ends <= torch.arange(L, device=key.device)[some, None] + 1
        p = (scores - lse[:, :, some, None]).exp().where(seen, 0.0)
        found.append(p.unflatten(1, (Hkv, -1)).sum(2) @ shares.to(p.dtype))
    return torch.cat(found, 2)


def _kept(make: Any, device: torch.device, *sizes: int) -> BlockMask:
    """A mask by its sizes, kept for its stream, but where a captured or traced graph owns it."""
    if torch.compiler.is_dynamo_compiling():
        mask: BlockMask = make(device, *sizes)
        return mask
    where, stream, captured = queue_of(device)
    return (_made.__wrapped__ if captured else _made)(make, stream, where, *sizes)


@lru_cache(64)
def _made(make: Any, stream: int, where: torch.device, *sizes: int) -> BlockMask:
    with torch.inference_mode(False):
        mask: BlockMask = make(where, *sizes)
    return mask


def _ended(where: torch.device, L: int, n: int, length: int, stride: int) -> BlockMask:
    """The mask of blocks of `length` keys, a stride apart, that end at a row or before."""

    def ended(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx * stride + length <= q_idx + 1

    return create_block_mask(ended, None, None, L, n, where)


def _window(where: torch.device, L: int, window: int) -> BlockMask:
    return create_block_mask(sliding_window(window - 1), None, None, L, L, where)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> Tensor:
    found: Tensor = _attention(query, key, value, None, mask, scale, True)
    return found


def _positions(query: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Rows [L, 1] and units [units]."""
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    return row, torch.arange(units, device=query.device)


def _of_query_heads(x: Tensor, query: Tensor) -> Tensor:
    """What key heads have, repeated for query's."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: 16 bits give equal scores to many."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
