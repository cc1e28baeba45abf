"""A BlockMask's lists in both directions, as a backward reads them; kept with the mask."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.problem.dense_blocks import dense_blocks
from flexattn.problem.runs import known_runs, rows_of, unwritten, versions
from flexattn.runtime.launch import Lists, as_list

__all__ = ["BothLists"]

_ATTRIBUTE = "_flexattn_by_key"


class _Kept(NamedTuple):
    """Lists by key, the tensors that they are of, and how often those had been written to."""

    lists: Lists
    sources: tuple[Tensor | None, ...]
    versions: list[Any]


class BothLists(NamedTuple):
    """A BlockMask's lists by query and by key, [B, H, blocks(, width)]; runs in both, or none."""

    by_query: Lists
    by_key: Lists

    @classmethod
    def of(cls, mask: BlockMask) -> BothLists:
        """The lists of a mask; those by key are made where it has none, and kept with it.

        Where a mask has runs, a number is read back once, which says whether its columns have.
        """
        by_query = Lists.of(mask)
        sources = (
            mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
            mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices,
        )  # fmt: skip
        kept: _Kept | None = getattr(mask, _ATTRIBUTE, None)
        if (
            kept is None
            or not all(map(is_, sources, kept.sources))
            or not unwritten(kept.versions)
        ):
            kept = _Kept(_by_key(mask, by_query), sources, versions(_given(sources)))
            if not any(each.is_inference() for each in _given(sources)):
                setattr(mask, _ATTRIBUTE, kept)
        by_key = kept.lists
        if by_query.runs is None or by_key.runs is None:
            return cls(by_query._replace(runs=None), by_key._replace(runs=None))
        return cls(by_query, by_key)

    def read(self, runs: bool) -> dict[str, Tensor]:
        """The tensors that a kernel takes, by its names for them."""
        found: dict[str, Tensor] = {}
        for name, lists in (("KV", self.by_query), ("Q", self.by_key)):
            for key, tensor in lists.read(runs).items():
                listed = key.replace("KV", name).replace("FULL", f"FULL_{name}")
                found[f"{name}_RUNS" if runs else listed] = tensor
        return found


def _given(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [each for each in tensors if each is not None]


def _by_key(mask: BlockMask, by_query: Lists) -> Lists:
    q_blocks = by_query.kv_num.shape[-1]
    kv_blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    num, idx = mask.q_num_blocks, mask.q_indices
    full_num, full_idx = mask.full_q_num_blocks, mask.full_q_indices
    lacking = by_query.full_idx is not None and full_idx is None
    if num is None or idx is None or lacking or num.shape[-1] < kv_blocks:
        num, idx = _transposed(by_query.kv_num, by_query.kv_idx, kv_blocks)
        full_num = full_idx = None
        if by_query.full_num is not None and by_query.full_idx is not None:
            full_num, full_idx = _transposed(by_query.full_num, by_query.full_idx, kv_blocks)
    if by_query.full_idx is None:
        full_num = full_idx = None
    runs = None
    if known_runs(mask) is not None and num.numel() and q_blocks and not _capturing(num):
        rows = rows_of(num, idx, full_num, full_idx, q_blocks)
        runs = rows.runs if bool(rows.joined) else None
    full = full_num, full_idx
    found, places = (None if each is None else as_list(each) for each in full)
    return Lists(as_list(num), as_list(idx), found, places, runs)


def _transposed(num: Tensor, idx: Tensor, kv_blocks: int) -> tuple[Tensor, Tensor]:
    """Lists of the query blocks of each key block, in order."""
    listed = dense_blocks(num, idx, kv_blocks).mT
    order = torch.argsort(listed.to(torch.int8), dim=-1, descending=True, stable=True)
    return listed.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
