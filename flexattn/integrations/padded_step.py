"""padded_mask(): the mask of one new row of a padded batch, written and not asked for.

transformers gives each step a padding mask of its own, and nothing tells that it is the last one
with a True behind it but a comparison, which waits for the device. A step copies it instead, to
where the masks of all steps read it: so these, and the launches that were found for them, serve
whatever the padding is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.few_rows import KEY_BLOCK, with_lists
from flexattn.block_mask.lazy import LazyBlockMask
from flexattn.integrations.static_step import FEW_KEYS
from flexattn.runtime.launch import raw_stream
from flexattn.util.lru import Lru

# Masks of one table that are kept: a batch that is as long as an earlier one makes none.
_MASKS = 1024
# Tables of a batch size: of a forward's kinds of masks, and of a step before that is still held.
_TABLES = 4
_ASK = -2  # no row follows this position
_SHARED = "_flexattn_shared"


class _Table:
    """The padding of a step, bool [B, keys], and for each length a part of it with its mask."""

    def __init__(self, B: int, device: torch.device) -> None:
        keys = -(-FEW_KEYS // (B * KEY_BLOCK)) * KEY_BLOCK
        # Of tensors made in inference mode autograd can save none.
        with torch.inference_mode(False):
            self._seen = torch.ones(B, keys, dtype=torch.bool, device=device)
        self._mask_mod = _reading(self._seen)
        self._masks: Lru[int, tuple[Tensor, LazyBlockMask]] = Lru(_MASKS)
        self._given: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        """Whether nobody holds the mask that was given last, or its mask_mod."""
        return self._given() is None

    def write(self, seen: Tensor) -> LazyBlockMask:
        """The mask of these keys, with a mask_mod of its own to tell who holds it."""
        keys = seen.shape[1]
        found = self._masks.get(keys)
        if found is None:
            found = self._seen[:, :keys], self._made(keys)
            self._masks.put(keys, found)
        part, shared = found
        part.copy_(seen)
        mask_mod = _reading(self._seen)
        self._given = weakref.ref(mask_mod)
        mask: LazyBlockMask = object.__new__(LazyBlockMask)
        mask.__dict__.update(shared.__dict__, mask_mod=mask_mod, **{_SHARED: (shared, mask_mod)})
        return mask

    def _made(self, keys: int) -> LazyBlockMask:
        """All blocks are listed: of few keys a GPU reads them sooner than it finds others."""
        device, blocks = self._seen.device, -(-keys // KEY_BLOCK)
        with torch.inference_mode(False):
            order = torch.arange(blocks, dtype=torch.int32, device=device).view(1, 1, 1, -1)
            count = torch.full((1, 1, 1), blocks, dtype=torch.int32, device=device)
        return with_lists((1, keys), (count, order), self._mask_mod)


class _Batch:
    """The tables of a batch size. at: the position of the last row, or _ASK."""

    def __init__(self) -> None:
        self.at, self._tables = _ASK, list[_Table]()

    def table(self, seen: Tensor) -> _Table:
        """One that may be written to: a mask that is still held keeps what it was made of."""
        found = next((each for each in self._tables if each.free), None)
        if found is None:
            found = _Table(len(seen), seen.device)
            self._tables = [*self._tables[1 - _TABLES :], found]
        return found


# Memory that another stream reads is not written, nor is what another thread was just given.
_batches: Lru[tuple[Any, ...], _Batch] = Lru(16)


def is_few(seen: Tensor) -> bool:
    """Whether `padded_mask` takes this padding: a plain tensor of few keys, and no gradients."""
    return 0 < seen.numel() <= FEW_KEYS and type(seen) is Tensor and not torch.is_grad_enabled()


def padded_mask(seen: Tensor, at: int) -> LazyBlockMask | None:
    """The mask of one new row that sees every key but those where `seen` is False.

    seen: as `is_few` has it, bool [B, keys]. at: the row's position. None where `seen` is asked
    and removes nothing: asked, which waits for the device, is a row that does not follow the last.
    The lists are those of other masks, too, and not to be written to.
    """
    stream = raw_stream(seen.get_device()) if seen.is_cuda else 0
    key = len(seen), seen.device, stream, threading.get_ident()
    batch = _batches.get(key)
    if batch is None:
        batch = _Batch()
        _batches.put(key, batch)
    if not 0 <= at - batch.at <= 1 and bool(seen.all()):
        batch.at = _ASK
        return None
    batch.at = at
    return batch.table(seen).write(seen)


def ask_again() -> None:
    """Let the next row of each batch ask, as after a prompt: what follows may not be padded."""
    for _, batch in _batches.items():
        batch.at = _ASK


def shared_mask(mask: BlockMask) -> BlockMask:
    """The mask by which launches are remembered, of one of `padded_mask` that the caller holds.

    Itself where a backward, which reads it later, may have to hold it, and where somebody gave it
    another mask_mod.
    """
    if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return mask
    shared, mask_mod = mask.__dict__.get(_SHARED, (mask, mask.mask_mod))
    return shared if mask_mod is mask.mask_mod else mask


def _reading(table: Tensor) -> Callable[..., Tensor]:
    def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, kv_idx]

    return kept
