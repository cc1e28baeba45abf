"""few_rows(): the BlockMask of one block of rows, as each step of decoding has a new one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexattn.block_mask.lazy import LazyBlockMask
from flexattn.problem.mask_class import keep_class

# Rows whose elements are evaluated one by one: what decoding has, drafts and trees included.
MOST_ROWS = 16
_BLOCK = 128
# Of a row that keeps most blocks, as that of a causal mask does.
_CLASS = "d1 i1 runs"


def few_rows(
    mask_mod: Callable[..., Tensor], B: int, Q_LEN: int, KV_LEN: int, device: torch.device
) -> LazyBlockMask:
    """The mask of at most MOST_ROWS rows, the same for all heads, in a dozen small operations.

    mask_mod(b, h, q_idx, kv_idx) -> bool is evaluated on positions int64 [B, 1, 1], [],
    [1, Q_LEN, 1] and [KV_LEN] at once; every block with an element that is kept is listed as a
    partial one. Nothing is read back from the device. So the mask's class, which chooses among
    tuned configs, is not looked up: it is that of rows that keep most of their blocks.
    """
    blocks = -(-KV_LEN // _BLOCK)
    b, q_idx, kv_idx = (torch.arange(size, device=device) for size in (B, Q_LEN, KV_LEN))
    kept = mask_mod(b.view(-1, 1, 1), kv_idx[0], q_idx.view(1, -1, 1), kv_idx)
    batches = kept.shape[0] if kept.dim() == 3 else 1
    kept = kept.expand(batches, Q_LEN, KV_LEN).any(1)
    some = pad(kept, (0, blocks * _BLOCK - KV_LEN)).view(-1, 1, blocks, _BLOCK).any(-1)
    listed = some.to(torch.int32)
    order = torch.sort(listed, descending=True, stable=True).indices.to(torch.int32)
    counts = listed.sum(-1, dtype=torch.int32).unsqueeze(-1)
    # By key there is one block of rows, or none.
    by_key = listed, torch.zeros_like(listed).unsqueeze(-1)
    mask = LazyBlockMask(
        (Q_LEN, KV_LEN), counts, order.unsqueeze(-2), None, None, *by_key, None, None,
        (_BLOCK, _BLOCK), mask_mod,
    )  # fmt: skip
    keep_class(mask, _CLASS)
    return mask
