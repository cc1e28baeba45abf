"""A BlockMask whose lists by key, which only a backward and torch's kernels read, come when asked.

At a million tokens each pair of them is as large as the lists by query, and torch's way to make
them needs several times that. Such a mask is of torch's own type: whatever knows BlockMask, as
pytree and torch.export may, knows it. It lacks the four attributes until one of them is read, and
torch's class, which has none of these names, makes them then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lists import transposed
from flexattn.util.ambient import without_modes

_NAMES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


class _Beside(NamedTuple):
    """What this library stores in a torch BlockMask. Unpickling it imports this module."""

    decided: bool


class _ByKey:
    """One of the lists by key as an attribute of torch's class, which a mask's own goes before."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, mask: BlockMask | None, owner: type) -> Tensor | None:
        # A mask that is half made, or the class itself.
        if mask is None or "_flexattn" not in mask.__dict__:
            raise AttributeError(self.name)
        _build(mask)
        found: Tensor | None = mask.__dict__[self.name]
        return found


for _name in _NAMES:
    setattr(BlockMask, _name, _ByKey(_name))


def lazy_mask(
    lists: tuple[Tensor, ...],
    block: tuple[int, int],
    mask_mod: Callable[..., Tensor],
    lengths: tuple[int, int],
    decided: bool = False,
) -> BlockMask:
    """The mask of counts and indices of partial blocks and, where given, of full ones.

    Reading any of its lists by key, as as_tuple() and a call of torch's own flex_attention do,
    makes all four. decided: whether the lists are what mask_mod keeps of the indices that they
    have; else they may hold more, as what any request keeps.
    """
    num, idx, *full = lists
    full_num, full_idx = full or (None, None)
    mask = BlockMask(
        lengths, num, idx, full_num, full_idx, None, None, None, None, block, mask_mod
    )  # fmt: skip
    for name in _NAMES:
        del mask.__dict__[name]
    mask.__dict__["_flexattn"] = _Beside(decided)
    if not mask.numel():  # by which torch divides
        mask.__dict__["sparsity"] = float
    return mask


def lists_pending(mask: BlockMask) -> bool:
    """Whether a mask's lists by key are not made yet."""
    return "q_num_blocks" not in mask.__dict__ or "q_indices" not in mask.__dict__


def decided(mask: BlockMask) -> bool:
    """Whether a mask's lists are known to hold only what mask_mod keeps."""
    beside = mask.__dict__.get("_flexattn")
    return beside is not None and bool(beside.decided)


def _by_key(mask: BlockMask, make: Any) -> list[Tensor | None]:
    found = [*make(mask.kv_num_blocks, mask.kv_indices), None, None]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        found[2:] = make(mask.full_kv_num_blocks, mask.full_kv_indices)
    return found


def _build(mask: BlockMask) -> None:
    # A compiler can look into torch's way, and not into the launch of a kernel.
    if torch.compiler.is_compiling():
        found = _by_key(mask, torch_flex._transpose_ordered)
    else:
        with without_modes():
            found = _by_key(mask, transposed)
    for name, tensor in zip(_NAMES, found, strict=True):
        if name not in mask.__dict__:  # or somebody set it
            setattr(mask, name, tensor)
