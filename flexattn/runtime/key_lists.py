"""A BlockMask's lists in both directions, as a backward reads them; kept with the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.problem.mask_lists import dense_blocks, keep_with, kept_with, mask_class, rows_of
from flexattn.runtime.launch import Lists

_ATTRIBUTE = "_flexattn_by_key"
_ORDER = "_flexattn_order"
_TURN = "_flexattn_turn"


# None for lists that it cannot read.
Turning = Callable[[Lists], Lists | None]


class BothLists(NamedTuple):
    """A BlockMask's lists by query and by key, [B, H, blocks(, width)]; runs in both, or none."""

    by_query: Lists
    by_key: Lists

    @classmethod
    def of(cls, mask: BlockMask) -> BothLists:
        """The lists of a mask; those by key are made of those by query, and kept with the mask.

        What a forward reads decides: a mask's own lists by key may be missing, or older than what
        was written into the others. Where a mask has runs, a number is read back once, which says
        whether its columns have.
        """
        by_query = Lists.of(mask)
        turn: Turning | None = getattr(mask, _TURN, None)
        by_key: Lists | None = kept_with(mask, _ATTRIBUTE) if turn is None else turn(by_query)
        if by_key is None:
            mask_class(mask)  # finds the runs that its lists may have, which by_query has then
            by_query = Lists.of(mask)
            by_key = made_by_key(mask, by_query)
            if not _capturing(by_query.kv_num):
                _await(by_key.kv_num)
                keep_by_key(mask, by_key)
        if by_query.runs is None or by_key.runs is None:
            return cls(by_query._replace(runs=None), by_key._replace(runs=None))
        return cls(by_query, by_key)

    def read(self, runs: bool, ordered: bool = False) -> dict[str, Tensor]:
        """The tensors of both lists by a kernel's names for them; see ReadLists.read."""
        found: dict[str, Tensor] = {}
        for name, lists in (("KV", self.by_query), ("Q", self.by_key)):
            for key, tensor in lists.read(runs).items():
                listed = key.replace("KV", name).replace("FULL", f"FULL_{name}")
                found[f"{name}_RUNS" if runs else listed] = tensor
        if ordered:
            found["Q_ORDER"] = self._order()
        return found

    def _order(self) -> Tensor:
        """int32 [B, H, key blocks, query blocks]: key blocks before one that the queries read.

        Of the lists by key, which blocks walk, and kept with them.
        """
        held = self.by_key.kv_num
        found: Tensor | None = getattr(held, _ORDER, None)
        if found is None:
            num, idx, full_num, full_idx, _ = self.by_key
            blocks = self.by_query.kv_num.shape[-1]
            listed = dense_blocks(num, idx, blocks)
            if full_num is not None and full_idx is not None:
                listed = listed | dense_blocks(full_num, full_idx, blocks)
            found = (listed.cumsum(-2, dtype=torch.int32) - listed.int()).contiguous()
            if not _capturing(held):
                _await(held)
                setattr(held, _ORDER, found)
        return found


def turn_by(mask: BlockMask, turn: Turning) -> None:
    """Have a mask's lists by key made of those by query by one launch, each time they are read."""
    setattr(mask, _TURN, turn)


def keep_by_key(mask: BlockMask, by_key: Lists) -> None:
    """Keep lists by key with a mask, while nobody writes to those by query."""
    keep_with(mask, _ATTRIBUTE, by_key)


def has_more_rows(mask: BlockMask) -> bool:
    """True if lists by query go on past the mask's last query, as those of a mask made shorter.

    Lists by key that name such rows would send a backward there.
    """
    return bool(mask.kv_num_blocks.shape[-1] > _blocks(mask)[0])


def made_by_key(mask: BlockMask, by_query: Lists) -> Lists:
    """The lists by key of a mask's lists by query; one number is read back where these have
    runs.
    """
    rows, kv_blocks = _blocks(mask)
    num, idx = _transposed(by_query.kv_num, by_query.kv_idx, rows, kv_blocks)
    full_num = full_idx = runs = None
    if by_query.full_num is not None and by_query.full_idx is not None:
        full_num, full_idx = _transposed(by_query.full_num, by_query.full_idx, rows, kv_blocks)
    if by_query.runs is not None and num.numel() and not _capturing(num):
        found = rows_of(num, idx, full_num, full_idx, rows)
        runs = found.runs if bool(found.joined) else None
    return Lists(num, idx, full_num, full_idx, runs)


def _blocks(mask: BlockMask) -> tuple[int, int]:
    """The numbers of blocks of a mask's queries and of its keys."""
    q_blocks, kv_blocks = (
        -(-length // size) for length, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    )
    return q_blocks, kv_blocks


def _transposed(num: Tensor, idx: Tensor, rows: int, kv_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists of the first query blocks of each key block, in order."""
    # What follows keeps the order of its dimensions in memory, and kernels read lists dense.
    listed = dense_blocks(num[..., :rows], idx[..., :rows, :], kv_blocks).mT.contiguous()
    order = torch.argsort(listed.to(torch.int8), dim=-1, descending=True, stable=True)
    return listed.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _await(made: Tensor) -> None:
    """Wait for what is kept from here on: the next call may read it on another stream."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
