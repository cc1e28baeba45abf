"""few_rows(): the BlockMask of one block of rows, as each step of decoding has a new one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.lazy import lazy_mask
from flexattn.problem.mask_class import keep_class
from flexattn.runtime.launch import raw_stream
from flexattn.util.lru import Lru

# Rows whose elements are evaluated one by one: what decoding has, drafts and trees included.
MOST_ROWS = 16
# Keys of a block of its lists.
KEY_BLOCK = 128
# Of a row that keeps most blocks, as that of a causal mask does.
_CLASS = "d1 i1 runs"
_Positions = tuple[Tensor, Tensor, Tensor, Tensor]
# Made once for the steps of a cache whose size stays; memory of another stream is not read.
_positions: Lru[tuple[int, int, int, torch.device, int], _Positions] = Lru(8)


def few_rows(
    mask_mod: Callable[..., Tensor], B: int, Q_LEN: int, KV_LEN: int, device: torch.device
) -> BlockMask:
    """The mask of at most MOST_ROWS rows, the same for all heads, in a dozen small operations.

    mask_mod(b, h, q_idx, kv_idx) -> bool is evaluated on positions int64 [B, 1, 1], [],
    [1, Q_LEN, 1] and [KV_LEN] at once; every block with an element that is kept is listed as a
    partial one. Nothing is read back from the device. So the mask's class, which chooses among
    tuned configs, is not looked up: it is that of rows that keep most of their blocks.
    """
    blocks = -(-KV_LEN // KEY_BLOCK)
    b, h, q_idx, kv_idx = positions(B, Q_LEN, KV_LEN, device)
    kept = mask_mod(b, h, q_idx, kv_idx)
    batches = kept.shape[0] if kept.dim() == 3 else 1
    kept = kept.expand(batches, Q_LEN, blocks * KEY_BLOCK)
    kept = kept[:, 0] if Q_LEN == 1 else kept.any(1)
    # Bytes, which every device sorts.
    listed = kept.reshape(batches, 1, blocks, KEY_BLOCK).any(-1).view(torch.uint8)
    order = torch.sort(listed, descending=True, stable=True).indices.to(torch.int32)
    counts = listed.sum(-1, dtype=torch.int32).unsqueeze(-1)
    return with_lists((Q_LEN, KV_LEN), (counts, order.unsqueeze(-2)), mask_mod)


def relisted(mask: BlockMask, KV_LEN: int) -> BlockMask:
    """The mask with the same lists for KV_LEN keys, the last of which is in their last block."""
    lists = mask.kv_num_blocks, mask.kv_indices
    return with_lists((mask.seq_lengths[0], KV_LEN), lists, mask.mask_mod)


def queue_of(device: torch.device) -> tuple[torch.device, int, bool]:
    """A device with its index, its current stream, and whether that one is being captured."""
    if device.type != "cuda":
        return device, 0, False
    asked: int | None = device.index  # None of torch.device("cuda")
    index = torch.cuda.current_device() if asked is None else asked
    capturing = torch.cuda.is_current_stream_capturing()
    return torch.device("cuda", index), raw_stream(index), capturing


def positions(B: int, Q_LEN: int, KV_LEN: int, device: torch.device) -> _Positions:
    """What a mask_mod is given for all elements at once: b, h, q_idx and kv_idx.

    int64 [B, 1, 1], [], [1, Q_LEN, 1] and [KV_LEN, up to whole blocks], where the last key stands
    for those past it. Not to be written to: who asks again on the same stream gets the same.
    """
    device, stream, capturing = queue_of(device)
    key = B, Q_LEN, KV_LEN, device, stream
    found = None if capturing else _positions.get(key)
    if found is None:
        # What is made in inference mode could not be read by a graph that is differentiated.
        with torch.inference_mode(False):
            b, q_idx, kv_idx = (
                torch.arange(size, device=device)
                for size in (B, Q_LEN, -(-KV_LEN // KEY_BLOCK) * KEY_BLOCK)
            )
            kv_idx = kv_idx.clamp(max=KV_LEN - 1)
            found = b.view(-1, 1, 1), kv_idx[0], q_idx.view(1, -1, 1), kv_idx
        # A tensor of another class, as of a trace, is of no use to others.
        if not capturing and type(kv_idx) is Tensor:
            _positions.put(key, found)
    return found


def with_lists(
    lengths: tuple[int, int], lists: tuple[Tensor, Tensor], mask_mod: Callable[..., Tensor]
) -> BlockMask:
    """A mask of few rows by its lengths and its lists, of blocks in which it may keep something.

    lists int32 [B or 1, 1, 1] and [B or 1, 1, 1, blocks]: how many blocks, and all of them with
    those in front.
    """
    mask = lazy_mask(lists, (KEY_BLOCK, KEY_BLOCK), mask_mod, lengths)
    keep_class(mask, _CLASS)
    return mask
