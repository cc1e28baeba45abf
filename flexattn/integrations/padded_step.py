"""padded_mask(): the mask of a step of one new row of a padded batch.

transformers makes a new padding mask in each step, and comparing it with the last one makes the
host wait for the device. So each step copies its padding into a table that stays, which the masks
of all steps read: masks and launches are reused whatever the padding is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.few_rows import KEY_BLOCK, relisted, with_lists
from flexattn.frontend.launch_cache import parts_of
from flexattn.integrations.static_step import FEW_KEYS
from flexattn.runtime.launch import raw_stream
from flexattn.util.locks import renewed
from flexattn.util.lru import Lru

# Masks of one table that are kept, one a length.
_MASKS = 1024
# Tables of a batch size. A forward may need two, for full layers and for windows; others are for
# masks that somebody still holds.
_TABLES = 4
_CHECK = -2  # In place of a position: the next step checks whether anything is padded.
_SHARED = "_flexattn_shared"


class _Table:
    """Which keys a step sees, bool [B, keys], and for each length a part of it with its mask."""

    def __init__(self, B: int, device: torch.device) -> None:
        keys = -(-FEW_KEYS // (B * KEY_BLOCK)) * KEY_BLOCK
        # Of tensors made in inference mode autograd can save none.
        with torch.inference_mode(False):
            self._seen = torch.ones(B, keys, dtype=torch.bool, device=device)
        self._mask_mod = _reads(self._seen)
        self._masks: Lru[int, tuple[Tensor, BlockMask]] = Lru(_MASKS)
        self._listed: dict[int, BlockMask] = {}
        self._last_mask_mod: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        """Whether nobody holds the mask that was given last, or its mask_mod."""
        return self._last_mask_mod() is None

    def write(self, seen: Tensor) -> BlockMask:
        """The mask of these keys, with a mask_mod of its own, which lives while it is held."""
        keys = seen.shape[1]
        found = self._masks.get(keys)
        if found is None:
            found = self._seen[:, :keys], self._made(keys)
            self._masks.put(keys, found)
        part, shared = found
        part.copy_(seen)
        mask_mod = _reads(self._seen)
        self._last_mask_mod = weakref.ref(mask_mod)
        mask: BlockMask = object.__new__(BlockMask)
        mask.__dict__.update(shared.__dict__, mask_mod=mask_mod, **{_SHARED: (shared, mask_mod)})
        return mask

    def _made(self, keys: int) -> BlockMask:
        """All blocks are listed: few keys are read in less time than it takes to find which."""
        device, blocks = self._seen.device, -(-keys // KEY_BLOCK)
        found = self._listed.get(blocks)
        if found is not None:
            return relisted(found, keys)
        with torch.inference_mode(False):
            order = torch.arange(blocks, dtype=torch.int32, device=device).view(1, 1, 1, -1)
            count = torch.full((1, 1, 1), blocks, dtype=torch.int32, device=device)
        found = self._listed[blocks] = with_lists((1, keys), (count, order), self._mask_mod)
        return found


class _Batch:
    """The tables of a batch size. last_row: the position of the last row, or _CHECK."""

    def __init__(self) -> None:
        self.last_row, self._tables = _CHECK, list[_Table]()
        self._lock = renewed(threading.Lock())

    def mask(self, seen: Tensor) -> BlockMask:
        """That of a table whose last mask nobody holds: one that is held keeps its padding."""
        with self._lock:
            found = next((each for each in self._tables if each.free), None)
            if found is None:
                found = _Table(len(seen), seen.device)
                self._tables = [*self._tables[1 - _TABLES :], found]
            return found.write(seen)


# One a stream: a kernel on another stream may still be reading the table.
_batches: Lru[tuple[int, torch.device, int], _Batch] = Lru(16)


def is_few(seen: Tensor) -> bool:
    """Whether `padded_mask` takes this padding: a plain tensor of few keys, and no gradients."""
    return 0 < seen.numel() <= FEW_KEYS and type(seen) is Tensor and not torch.is_grad_enabled()


def padded_mask(seen: Tensor, at: int) -> BlockMask | None:
    """The mask of one new row that sees every key but those where `seen` is False.

    seen: as `is_few` has it, bool [B, keys]. at: the row's position. None where `seen` is checked
    and removes nothing: a row that does not follow the last one is checked, which waits for the
    device. The lists are those of other masks, too, and not to be written to.
    """
    stream = raw_stream(seen.get_device()) if seen.is_cuda else 0
    key = len(seen), seen.device, stream
    batch = _batches.get(key)
    if batch is None:
        batch = _Batch()
        _batches.put(key, batch)
    if not 0 <= at - batch.last_row <= 1 and bool(seen.all()):
        batch.last_row = _CHECK
        return None
    batch.last_row = at
    return batch.mask(seen)


def check_again() -> None:
    """Let the next step of each batch check, as after a prompt: what follows may not be padded."""
    for _, batch in _batches.items():
        batch.last_row = _CHECK


def shared_mask(mask: BlockMask) -> BlockMask:
    """The mask to look launches up by: its table's own, of one that `padded_mask` made.

    The caller holds the mask until its launch. The mask itself where a backward, which reads it
    later, may have to hold it, and where somebody gave it another mask_mod, lists or lengths.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return mask
    shared: BlockMask
    shared, mask_mod = mask.__dict__.get(_SHARED, (mask, None))
    same = all(map(is_, parts_of(mask)[1:], parts_of(shared)[1:]))
    return shared if same and mask_mod is mask.mask_mod else mask


def _reads(table: Tensor) -> Callable[..., Tensor]:
    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, kv_idx]

    return kept
