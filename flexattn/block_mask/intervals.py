"""The BlockMask of rows that each see one interval of keys, neither end of which moves back.

Packed sequences are such rows, causal or with a window. Their lists follow from the intervals of
each block's first and last row, in both directions, so no element is evaluated, no number is read
back, and a graph that is being traced or captured holds the same operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lists import lazy_mask
from flexattn.mods.expr import MaskMod
from flexattn.problem.mask_lists import keep_class, keep_runs
from flexattn.runtime.key_lists import keep_by_key
from flexattn.runtime.launch import Lists

# Rows, and keys, of a block.
LIST_BLOCK = 128
# Looking for the class would wait for the device, and another class for each pack may have another
# kernel to compile: it is that of causal documents of some thousand tokens in a row of 32k.
_CLASS = "d1/16 i4 runs"


def interval_mask(
    first: Tensor, end: Tensor, keys: int, mask_mod: MaskMod, whole: bool, by_key: bool
) -> BlockMask:
    """The mask whose row i sees keys from first[i] to before end[i], of those what mask_mod keeps.

    first, end int32 [rows], rows and keys above 0; first <= end, and neither decreases. whole:
    mask_mod keeps all of an interval, so blocks inside of it are full. by_key: a backward may
    read the mask, whose lists by key are made now.
    """
    rows = first.shape[0]
    device = first.device
    at = torch.arange(-(-rows // LIST_BLOCK), dtype=torch.int32, device=device)
    bottom = ((at + 1) * LIST_BLOCK).clamp(max=rows) - 1
    # No views, in which Inductor of torch 2.11 searches from the beginning of their memory.
    low, low_bottom = first[at * LIST_BLOCK], first[bottom]
    high, high_bottom = end[at * LIST_BLOCK], end[bottom]
    # Rows of a block that reaches past the last one make no full block.
    full = (
        (low_bottom + LIST_BLOCK - 1) // LIST_BLOCK,
        (high // LIST_BLOCK).where(at < rows // LIST_BLOCK, 0),
    )
    reach = low // LIST_BLOCK, (high_bottom + LIST_BLOCK - 1) // LIST_BLOCK
    by_query = _lists(*reach, full if whole else None, -(-keys // LIST_BLOCK))
    found = None
    if by_key:
        left = torch.arange(-(-keys // LIST_BLOCK), dtype=torch.int32, device=device) * LIST_BLOCK
        right = left + LIST_BLOCK
        full_end = _count(low_bottom, left, True).clamp(max=rows // LIST_BLOCK)
        full = _count(high, right, False), full_end
        reach = _count(high_bottom, left, True), _count(low, right, False)
        found = _lists(*reach, full if whole else None, -(-rows // LIST_BLOCK))
    lengths, block = (rows, keys), (LIST_BLOCK, LIST_BLOCK)
    if torch.compiler.is_dynamo_compiling():
        make: Any = BlockMask
        lists = by_query[:4], (None,) * 4 if found is None else found[:4]
        mask: BlockMask = make(lengths, *lists[0], *lists[1], block, mask_mod)
        return mask
    given = tuple(x for x in by_query[:4] if x is not None)
    mask = lazy_mask(given, block, mask_mod, lengths)
    keep_class(mask, _CLASS)
    assert by_query.runs is not None
    keep_runs(mask, by_query.runs)
    if found is not None:
        keep_by_key(mask, found)
    return mask


def _count(values: Tensor, bounds: Tensor, equal: bool) -> Tensor:
    """The number of values, which do not decrease, below each bound; with equal, also at it."""
    return torch.searchsorted(values, bounds, right=equal, out_int32=True)


def _lists(first: Tensor, end: Tensor, full: tuple[Tensor, Tensor] | None, width: int) -> Lists:
    """Lists of the blocks from first to before end of each row, of which full ones lie between.

    first, end, and both of full: int32 [rows]. Indices hold each of `width` blocks once, those
    that are listed in front.
    """
    end = torch.maximum(first, end)
    here = torch.arange(width, dtype=torch.int32, device=first.device)
    begin = first[:, None]
    if full is None:
        indices = (begin + here) % width
        runs = torch.stack((first, end, first, end), -1)
        return Lists(_shared(end - first), _shared(indices), None, None, _shared(runs))
    some = full[1] > full[0]
    inner, outer = (torch.where(some, x, end) for x in full)
    count = outer - inner
    # Blocks before the full ones, those behind them and round to the first, and the full ones.
    before, behind = (inner - first)[:, None], (width - count)[:, None]
    round_ = (outer[:, None] + here - before) % width
    rest = torch.where(here < behind, round_, inner[:, None] + here - behind)
    indices = torch.where(here < before, begin + here, rest)
    full_indices = (inner[:, None] + here) % width
    runs = torch.stack((first, inner, torch.where(some, outer, first), end), -1)
    return Lists(
        _shared(end - first - count), _shared(indices), _shared(count), _shared(full_indices),
        _shared(runs),
    )  # fmt: skip


def _shared(x: Tensor) -> Tensor:
    """Lists for all batches and heads."""
    return x[None, None]
