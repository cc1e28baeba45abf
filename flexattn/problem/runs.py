"""Runs: a BlockMask's rows as the ends of their blocks, where the blocks of each row join up."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_ATTRIBUTE = "_flexattn_runs"


class Rows(NamedTuple):
    """What the lists of a mask say of its rows, each [..., rows].

    listed: how many blocks. first, end: the lowest one, and one past the highest; the same number
    where there is none. runs [..., rows, 4] int32: (first, first full, end of full, end) in
    blocks, or (first, end, first, end) of a row without full blocks, so that none lies between
    the middle two. joined: a bool tensor without dimensions, whether the runs say all that the
    lists say.
    """

    listed: Tensor
    first: Tensor
    end: Tensor
    runs: Tensor
    joined: Tensor


class _Kept(NamedTuple):
    """What was found in lists, the lists, and how often those had been written to."""

    found: Any
    lists: tuple[Tensor | None, ...]
    versions: list[Any]


def rows_of(
    num: Tensor, idx: Tensor, full_num: Tensor | None, full_idx: Tensor | None, kv_blocks: int
) -> Rows:
    """The rows of lists of blocks: num [..., rows], idx [..., rows, width]; nothing is read back.

    Full blocks join up where they are consecutive, all blocks where they are so together; and no
    block may be listed twice.
    """
    low, high, listed, joined = _ends(num, idx, kv_blocks)
    full_low, full_high = torch.full_like(low, kv_blocks), torch.full_like(high, -1)
    counts = num
    if full_num is not None and full_idx is not None:
        full_low, full_high, _, rising = _ends(full_num, full_idx, kv_blocks)
        between = (idx >= full_low.unsqueeze(-1)) & (idx <= full_high.unsqueeze(-1)) & listed
        full = (full_num == 0) | (full_high - full_low + 1 == full_num)
        joined = joined & rising & full.all() & ~between.any()
        low, high = torch.minimum(low, full_low), torch.maximum(high, full_high)
        counts = num + full_num
    end = high + 1
    first = torch.minimum(low, end)
    some = full_high >= 0
    middle = torch.where(some, full_low, end), torch.where(some, full_high + 1, first)
    runs = torch.stack([first, *middle, end], -1).to(torch.int32)
    return Rows(counts, first, end, runs, joined & (end - first == counts).all())


def _ends(counts: Tensor, indices: Tensor, kv_blocks: int) -> tuple[Tensor, ...]:
    """Of each row: the lowest and the highest listed block, or `kv_blocks` and -1 of an empty one.

    Then which entries are listed, and whether every row lists its blocks once and in order.
    """
    width = indices.shape[-1]
    listed = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
    if not width:
        nothing = torch.zeros_like(counts)
        return nothing + kv_blocks, nothing - 1, listed, listed.all()
    low = torch.where(listed, indices, kv_blocks).amin(-1)
    high = torch.where(listed, indices, -1).amax(-1)
    rising = (indices[..., 1:] > indices[..., :-1]) | ~listed[..., 1:]
    return low, high, listed, rising.all()


def keep_runs(mask: BlockMask, runs: Tensor) -> None:
    """Keep a mask's runs with it, while nobody writes to its lists."""
    keep_with(mask, _ATTRIBUTE, runs)


def known_runs(mask: BlockMask) -> Tensor | None:
    """The runs kept with a mask, [B, H, rows, 4]; None where there are none that still hold."""
    found: Tensor | None = kept_with(mask, _ATTRIBUTE)
    return found


def keep_with(mask: BlockMask, attribute: str, found: Any) -> None:
    """Keep what was found in a mask's lists by query with it, while nobody writes to them.

    A tensor that was made in inference mode does not tell when it is written to: nothing is kept
    with such a mask. What a replayed CUDA graph writes into lists goes unseen.
    """
    lists = query_lists(mask)
    given = [each for each in lists if each is not None]
    if not any(each.is_inference() for each in given):
        setattr(mask, attribute, _Kept(found, lists, versions(given)))


def kept_with(mask: BlockMask, attribute: str) -> Any:
    """What `keep_with` kept; None where there is nothing that still holds."""
    kept: _Kept | None = getattr(mask, attribute, None)
    if kept is None or not all(map(is_, query_lists(mask), kept.lists)):
        return None
    return kept.found if unwritten(kept.versions) else None


def versions(lists: list[Tensor]) -> list[Any]:
    """A mask's lists, how often they were written to, where they lie and how.

    A version counts what is written in place; `.data = …` gives other memory and sizes unseen.
    """
    return [(x, x._version, x.data_ptr(), x.shape, x.is_contiguous()) for x in lists]


def unwritten(seen: list[Any]) -> bool:
    """Whether lists still are as `versions` saw them."""
    for each, version, place, shape, dense in seen:
        if each._version != version or each.data_ptr() != place:
            return False
        if each.shape != shape or each.is_contiguous() != dense:
            return False
    return True


def query_lists(mask: BlockMask) -> tuple[Tensor | None, ...]:
    """A mask's lists by query: counts and indices of partial blocks, then of full ones."""
    return (
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
    )  # fmt: skip
