"""decoding_mask(): the mask of a padded batch that decodes, made once for all steps of a padding.

Each step brings a mask of its own, which is the last one and a True for the new key. So what was
made of a padding is kept with room for keys to come, and a step compares: one operation and one
wait, as asking whether the mask removes anything takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.few_rows import KEY_BLOCK, few_rows, relisted
from flexattn.runtime.launch import raw_stream
from flexattn.util.lru import Lru

# Keys that a padding has room for beside those of its first step.
_ROOM = 1024
# Masks of one padding that are kept, for prompts that are answered again.
_MASKS = 256


class _Padding(NamedTuple):
    """A padding and its masks, which nobody writes to.

    table: bool [B, room], True behind the keys of the step that it was made in; mask_mod reads it.
    listed: a mask for each number of blocks. masks: the mask for each number of keys.
    """

    table: Tensor
    mask_mod: Callable[..., Tensor]
    listed: Lru[int, BlockMask]
    masks: Lru[int, BlockMask]

    def is_of(self, seen: Tensor) -> bool:
        """Whether `seen` removes these keys and no others; waits for the device."""
        length = seen.shape[1]
        return length <= self.table.shape[1] and torch.equal(seen, self.table[:, :length])

    def mask(self, length: int) -> BlockMask:
        found = self.masks.get(length)
        if found is None:
            found = relisted(self._listed(-(-length // KEY_BLOCK)), length)
            self.masks.put(length, found)
        return found

    def _listed(self, blocks: int) -> BlockMask:
        """Its lists serve each length that ends in the last block, whose other keys are kept."""
        found = self.listed.get(blocks)
        if found is None:
            device = self.table.device
            with torch.inference_mode(False):
                found = few_rows(self.mask_mod, len(self.table), 1, blocks * KEY_BLOCK, device)
            self.listed.put(blocks, found)
        return found


# The last padding of a batch size on a stream: memory that another stream writes is not read.
_paddings: Lru[tuple[int, torch.device, int], _Padding] = Lru(16)


def decoding_mask(seen: Tensor) -> BlockMask | None:
    """The mask of one new row that sees every key but those where `seen` is False.

    seen [B, keys], bool. None where it removes nothing. Who asks again on the same stream gets the
    same object, not to be written to. It waits for the device once, and twice for a new padding.
    """
    key = len(seen), seen.device, _stream(seen)
    known = _paddings.get(key)
    if known is not None and known.is_of(seen):
        return known.mask(seen.shape[1])
    if bool(seen.all()):
        return None
    # Of tensors made in inference mode autograd can save none.
    with torch.inference_mode(False):
        room = -(-(seen.shape[1] + _ROOM) // KEY_BLOCK) * KEY_BLOCK
        table = seen.new_ones((len(seen), room))
        table[:, : seen.shape[1]] = seen

    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, kv_idx]

    known = _Padding(table, kept, Lru(_MASKS), Lru(_MASKS))
    _paddings.put(key, known)
    return known.mask(seen.shape[1])


def _stream(tensor: Tensor) -> int:
    return raw_stream(tensor.get_device()) if tensor.is_cuda else 0
