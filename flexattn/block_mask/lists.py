"""A BlockMask's lists, written from kinds of blocks row by row, and read back into blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flexattn.block_mask.classify import FULL, PARTIAL

# Blocks that are listed at a time: their places take some 30 bytes each. A kernel of its own would
# be faster at a million tokens, and cost every process that makes a mask a second compile.
_CHUNK = 2**21


def lists_of(
    parts: Iterable[tuple[int, Tensor]],
    shape: tuple[int, int, int, int],
    device: torch.device,
    separate: bool = True,
) -> tuple[Tensor, ...]:
    """Counts and indices of partial blocks and, where `separate`, of full ones, as torch has them.

    parts: kinds int8 [rows, kv blocks] with their first row, counted over B, H and q blocks.
    shape: B, H, q blocks, kv blocks. Counts are int32 [B, H, q blocks]. Indices are int32 of
    `shape`: those listed, in order, and then the others, in order.
    """
    lists: list[Tensor] = []
    for _ in range(1 + separate):
        lists.append(torch.zeros(shape[:3], dtype=torch.int32, device=device))
        lists.append(torch.empty(shape, dtype=torch.int32, device=device))
    for first, kinds in parts:  # none where there are no blocks
        rows = slice(first, first + kinds.shape[0])
        some = tuple(each.view(-1, *each.shape[3:])[rows] for each in lists)
        _write(kinds, some, separate)
    return tuple(lists)


def transposed(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Lists of the rows [..., rows] of each column, from those of the columns of each row.

    indices [..., rows, columns] holds every column once, as `lists_of` leaves it.
    """
    *batch, rows, columns = indices.shape
    if not indices.numel():
        return counts.new_zeros([*batch, columns]), indices.new_zeros([*batch, columns, rows])
    kinds = torch.zeros(indices.shape, dtype=torch.int8, device=indices.device)
    dense, flat = kinds.view(-1, columns), indices.reshape(-1, columns)
    here = torch.arange(columns, device=indices.device)
    step = max(1, _CHUNK // max(columns, 1))
    for first in range(0, dense.shape[0], step):
        part = slice(first, first + step)
        listed = here < counts.reshape(-1, 1)[part]
        dense[part].scatter_(1, flat[part].long(), listed.to(torch.int8))
    swapped = kinds.transpose(-2, -1).reshape(-1, rows)
    one, other = lists_of([(0, swapped)], (1, 1, *swapped.shape), indices.device, separate=False)
    return one.view(*batch, columns), other.view(*batch, columns, rows)


def _write(kinds: Tensor, lists: tuple[Tensor, ...], separate: bool) -> None:
    step = max(1, _CHUNK // kinds.shape[1])
    for first in range(0, kinds.shape[0], step):
        part = slice(first, first + step)
        some = kinds[part]
        _ordered(some == PARTIAL if separate else some != 0, lists[0][part], lists[1][part])
        if separate:
            _ordered(some == FULL, lists[2][part], lists[3][part])


def _ordered(listed: Tensor, counts: Tensor, indices: Tensor) -> None:
    """Each column's place among the listed ones, or behind them among the others."""
    until = listed.cumsum(1, dtype=torch.int32)
    total = until[:, -1:]
    here = torch.arange(listed.shape[1], dtype=torch.int32, device=listed.device)
    place = torch.where(listed, until - 1, (total + here).sub_(until))
    counts.copy_(total[:, 0])
    indices.scatter_(1, place.long(), here.expand_as(indices))
