"""A BlockMask whose lists by key, which only a backward and torch's kernels read, come when asked.

At a million tokens each pair of them is as large as the lists by query, and torch's way to make
them needs several times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lists import transposed

_NAMES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def _by_key(name: str) -> Any:
    """One of the four lists by key as an attribute that is computed when it is first read."""

    def read(mask: LazyBlockMask) -> Tensor | None:
        if mask.pending:
            mask._build()
        found: Tensor | None = mask.__dict__["_" + name]
        return found

    def write(mask: LazyBlockMask, value: Tensor | None) -> None:
        mask.__dict__["_" + name] = value

    return property(read, write)


class LazyBlockMask(BlockMask):
    """torch's BlockMask, with its lists by key made from those by query on first use.

    Every method of torch's is inherited; what it returns has all of its lists. Reading any of the
    four attributes, as_tuple() and so a call of torch's own flex_attention among those who do,
    builds all four.
    """

    q_num_blocks = _by_key("q_num_blocks")
    q_indices = _by_key("q_indices")
    full_q_num_blocks = _by_key("full_q_num_blocks")
    full_q_indices = _by_key("full_q_indices")

    @classmethod
    def of(
        cls,
        lists: tuple[Tensor, ...],
        block: tuple[int, int],
        mask_mod: Callable[..., Tensor],
        lengths: tuple[int, int],
        decided: bool = False,
    ) -> LazyBlockMask:
        """The mask of counts and indices of partial blocks and, where given, of full ones.

        decided: whether they are what mask_mod keeps of the indices that the lists have; else they
        may hold more, as what any request keeps.
        """
        num, idx, *full = lists
        full_num, full_idx = full or (None, None)
        mask = cls(
            lengths, num, idx, full_num, full_idx, None, None, None, None, block, mask_mod
        )  # fmt: skip
        mask.__dict__.update(_pending=True, _decided=decided)
        return mask

    @property
    def pending(self) -> bool:
        """Whether its lists by key have yet to be made."""
        return bool(self.__dict__.get("_pending", False))

    @property
    def decided(self) -> bool:
        """Whether its lists hold what mask_mod keeps of their indices, and no more."""
        return bool(self.__dict__.get("_decided", False))

    def sparsity(self) -> float:
        """The percentage of blocks that are not computed; 0 where a length is 0."""
        return super().sparsity() if self.numel() else 0.0

    def _build(self) -> None:
        # A compiler can look into torch's way, and not into the launch of a kernel.
        compiling = torch.compiler.is_compiling()
        make: Any = torch_flex._transpose_ordered if compiling else transposed
        found = [*make(self.kv_num_blocks, self.kv_indices)]
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            found += make(self.full_kv_num_blocks, self.full_kv_indices)
        for name, tensor in zip(_NAMES, found, strict=False):
            if self.__dict__["_" + name] is None:  # or somebody set it
                self.__dict__["_" + name] = tensor
        self.__dict__["_pending"] = False
