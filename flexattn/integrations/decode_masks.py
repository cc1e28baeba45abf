"""Masks of one new row, as a step of `generate` needs them: in few operations, without a wait.

Static caches (`static_mask`): tensors of fixed sizes hold all that changes between steps. A Python
number would be an input of the graph, and torch would record one CUDA graph for each value.

Padded batches with few keys (`padded_mask`): each step copies its padding into one table. The
masks of all steps read that table, so masks and launches are reused whatever the padding is.
transformers makes a new padding mask in each step, and comparing it with the last one makes the
host wait for the device.

Padded batches with more keys (`decoding_mask`): the table of a padding is kept, with room for keys
to come. A step compares its padding with it: one operation and one wait, as many as asking whether
the mask removes anything. Each step's mask is the last one and a True for the new key.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from flexattn import catalogue
from flexattn.block_mask.lists import KEY_BLOCK, few_rows, kept_tensors, relisted, with_lists
from flexattn.frontend.launch_cache import parts_of
from flexattn.runtime.launch import raw_stream
from flexattn.util.locks import Lru, renewed

MaskFunction = Callable[..., Tensor]
# Keys of all batches that a GPU reads in the time that it takes to find where padding ends.
FEW_KEYS = 8192


class _Tables(NamedTuple):
    """Tensors that the steps of a cache of so many keys share; nobody writes to them.

    places int32 [keys, 5]: a position, and in the last column, which is aligned as tensors of
    torch's are, how many blocks reach up to it. counts int32 [blocks + 1, 4]: the number of each
    row in its first column. blocks int32 [keys]: the block of a key. order int32
    [1, 1, 1, blocks]: all blocks; orders int32 [blocks, blocks]: the same from each of them on.
    unseen bool [B, keys]: False.
    """

    places: Tensor
    counts: Tensor
    blocks: Tensor
    order: Tensor
    orders: Tensor
    unseen: Tensor

    @classmethod
    def of(cls, B: int, keys: int, device: torch.device) -> _Tables:
        last = -(-keys // KEY_BLOCK)
        key = torch.arange(keys, dtype=torch.int32, device=device)
        blocks = key // KEY_BLOCK
        twice = torch.arange(last, dtype=torch.int32, device=device).repeat(2)
        found = cls(
            torch.stack([key, key, key, key, blocks + 1], 1),
            torch.arange(last + 1, dtype=torch.int32, device=device)[:, None].repeat(1, 4),
            blocks,
            twice[:last].view(1, 1, 1, -1),
            twice.as_strided((last, last), (1, 1)),
            torch.zeros(B, keys, dtype=torch.bool, device=device),
        )
        # A CUDA graph reads it where it lies, in place of copying it in every step. A static cache
        # of transformers has imported what makes graphs; nobody else waits for that here.
        if "torch._dynamo" in sys.modules:
            torch._dynamo.mark_static_address(found.order)
        return found


def static_mask(
    mask_function: MaskFunction,
    B: int,
    keys: int,
    at: int | Tensor,
    offset: int,
    seen: Tensor | None,
    near: bool,
    device: torch.device,
) -> BlockMask:
    """The mask of one row over a cache of `keys` keys.

    mask_function(b, h, q_idx, kv_idx) takes positions in the sequence. at: the row's, an int64
    tensor of one element that may be written to afterwards, or a number; offset: the first key's.
    seen [B, positions], bool: False where a key is removed, as are those behind its end. near:
    whether no key of the cache is too far back for the function.

    Blocks are listed that the row may see something of. For a function that is known to see no key
    after the row, and has all keys near, these are the blocks up to the row, of more than FEW_KEYS
    keys from the first one on that is seen, and no element is evaluated for them.
    """
    here = None if seen is None else seen[:, offset : offset + keys].to(torch.bool)
    if not (not_after(mask_function) and near):
        # Of a cache that grows as well, to whose next length no tables would be of use.
        kept = None if here is None else pad(here, (0, keys - here.shape[1]))
        mask_mod = moved_mask(mask_function, _own(at, device), _number(offset, device))
        return few_rows(and_padding(mask_mod, kept), B, 1, keys, device)
    tables = kept_tensors(_Tables.of, (B, keys), device)
    kept = None
    if here is not None:
        kept = torch.cat((here, tables.unseen[:, here.shape[1] :]), 1)
    if isinstance(at, Tensor) and not offset:
        place = tables.places.index_select(0, at.view(1))
        mask_mod = and_padding(_placed(mask_function, place[0, 0]), kept)
        lists = _lists(tables, place[:, 4:], kept if B * keys > FEW_KEYS else None)
        return with_lists((1, keys), lists, mask_mod)
    mask_mod = moved_mask(mask_function, _own(at, device), _number(offset, device))
    mask_mod = and_padding(mask_mod, kept)
    if isinstance(at, Tensor):
        return few_rows(mask_mod, B, 1, keys, device)
    blocks = min(max((at - offset) // KEY_BLOCK + 1, 0), tables.order.shape[3])
    lists = _lists(tables, tables.counts[blocks, :1], None)
    return with_lists((1, keys), lists, mask_mod)


def not_after(mask_function: Any) -> bool:
    """True of a function that is known to keep no key after its row; False if in doubt.

    It is `catalogue.causal`, transformers' causal function, or transformers' intersection of one
    of these with others, as its windows are.
    """
    if mask_function is catalogue.causal:
        return True
    module = sys.modules.get("transformers.masking_utils")
    plain, both = (getattr(module, name, None) for name in ("causal_mask_function", "and_masks"))
    if plain is None or both is None:
        return False
    if mask_function is plain:
        return True
    parts = getattr(mask_function, "__closure__", None)
    if not parts or mask_function.__code__ is not both().__code__:
        return False
    return any(map(not_after, parts[0].cell_contents))


def window_of(mask_function: Any) -> tuple[int, int] | None:
    """The keys on each side, -1 for all, that a mask_function keeps; None if it is no window.

    It is `catalogue.causal`, or transformers' causal or bidirectional function, window, or their
    intersection, also within packed sequences, whose positions it counts.
    """
    theirs: Any = sys.modules.get("transformers.masking_utils")
    if mask_function is catalogue.causal:
        return -1, 0
    if theirs is None or not hasattr(mask_function, "__code__"):
        return None
    if mask_function is theirs.causal_mask_function:
        return -1, 0
    code, cells = mask_function.__code__, mask_function.__closure__ or ()
    held = {x: cell.cell_contents for x, cell in zip(code.co_freevars, cells, strict=True)}
    if code is theirs.sliding_window_overlay(1).__code__:
        return held["sliding_window"] - 1, -1
    if mask_function is theirs.bidirectional_mask_function:
        return -1, -1
    if code is theirs.packed_sequence_mask_function(None).__code__:
        return -1, -1
    if code is theirs.remap_positions_for_packed_sequence(None, None).__code__:
        return window_of(held["mask_function"])
    if code is not theirs.and_masks().__code__:
        return None
    windows = [window_of(each) for each in held["mask_functions"]]
    left, right = (
        min((each[side] for each in windows if each and each[side] >= 0), default=-1)
        for side in (0, 1)
    )
    return None if None in windows else (left, right)


def _own(at: int | Tensor, device: torch.device) -> Tensor:
    """A position that nobody else writes to.

    A static cache counts on in the very tensor that it gives, before the kernel runs.
    """
    return at.clone() if isinstance(at, Tensor) else _number(at, device)


def _number(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=device)


def _placed(mask_function: MaskFunction, first: Tensor) -> MaskFunction:
    def placed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + first, kv_idx)

    return placed


def moved_mask(
    mask_function: MaskFunction, first: int | Tensor, offset: int | Tensor
) -> MaskFunction:
    """A function of positions in the sequence as a mask_mod of rows and keys from these on."""

    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + first, kv_idx + offset)

    return moved


def and_padding(whole: MaskFunction, kept: Tensor | None) -> MaskFunction:
    """A mask_mod that also removes the keys where kept [B, keys], bool, is False."""
    if kept is None:
        return whole

    def padded(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return whole(b, h, q_idx, kv_idx) & kept[b, kv_idx]

    return padded


def _lists(tables: _Tables, counts: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The lists of the first blocks, as many as counts, of one element, says.

    kept: the blocks before the first key that it keeps are left out.
    """
    if kept is None:
        return counts.view(1, 1, 1), tables.order
    start = tables.blocks.index_select(0, kept.view(torch.uint8).argmax(1))
    # The first key may stand behind the row, which then sees nothing.
    counts = (counts.view(1) - start).clamp_(min=0)
    return counts.view(-1, 1, 1), tables.orders.index_select(0, start)[:, None, None]


# Masks of one table that are kept, one a length.
_MASKS = 1024
# Tables of a batch size. A forward may need two, for full layers and for windows; others are for
# masks that somebody still holds.
_TABLES = 4
_CHECK = -2  # In place of a position: the next step checks whether anything is padded.
_SHARED = "_flexattn_shared"


class _Masks:
    """Masks of one table by their lengths. made: the mask of so many blocks, which has the lists.

    Its lists serve each length that ends in the last block, whose other keys are kept.
    """

    def __init__(self, made: Callable[[int], BlockMask]) -> None:
        self._made = made
        self._listed: Lru[int, BlockMask] = Lru(_MASKS)
        self._masks: Lru[int, BlockMask] = Lru(_MASKS)

    def of(self, keys: int) -> BlockMask:
        """The mask of so many keys, not to be written to."""
        found = self._masks.get(keys)
        if found is None:
            blocks = -(-keys // KEY_BLOCK)
            listed = self._listed.get(blocks)
            if listed is None:
                # Of tensors made in inference mode autograd can save none.
                with torch.inference_mode(False):
                    listed = self._made(blocks)
                self._listed.put(blocks, listed)
            found = relisted(listed, keys)
            self._masks.put(keys, found)
        return found


class _Table:
    """Which keys a step sees, bool [B, keys], and for each length a part of it with its mask."""

    def __init__(self, B: int, device: torch.device) -> None:
        keys = -(-FEW_KEYS // (B * KEY_BLOCK)) * KEY_BLOCK
        # Of tensors made in inference mode autograd can save none.
        with torch.inference_mode(False):
            self._seen = torch.ones(B, keys, dtype=torch.bool, device=device)
        self._mask_mod = _reads(self._seen)
        self._masks = _Masks(self._whole)
        self._parts: Lru[int, Tensor] = Lru(_MASKS)
        self._last_mask_mod: Callable[[], object] = lambda: None

    @property
    def free(self) -> bool:
        """True where nobody holds the mask that was given last, or its mask_mod."""
        return self._last_mask_mod() is None

    def write(self, seen: Tensor) -> BlockMask:
        """The mask of these keys, with a mask_mod of its own, which lives while it is held."""
        keys = seen.shape[1]
        shared, part = self._masks.of(keys), self._parts.get(keys)
        if part is None:
            part = self._seen[:, :keys]
            self._parts.put(keys, part)
        part.copy_(seen)
        mask_mod = _reads(self._seen)
        self._last_mask_mod = weakref.ref(mask_mod)
        mask: BlockMask = object.__new__(BlockMask)
        mask.__dict__.update(shared.__dict__, mask_mod=mask_mod, **{_SHARED: (shared, mask_mod)})
        return mask

    def _whole(self, blocks: int) -> BlockMask:
        """All blocks are listed: few keys are read in less time than it takes to find which."""
        numbers: Any = {"dtype": torch.int32, "device": self._seen.device}
        order = torch.arange(blocks, **numbers).view(1, 1, 1, -1)
        count = torch.full((1, 1, 1), blocks, **numbers)
        return with_lists((1, blocks * KEY_BLOCK), (count, order), self._mask_mod)


class _Batch:
    """The tables of a batch size on a stream, which others may still read, and its last padding.

    last_row: the position of the last row, or _CHECK.
    """

    def __init__(self) -> None:
        self.last_row, self._tables = _CHECK, list[_Table]()
        self.padding: _Padding | None = None
        self._lock = renewed(threading.Lock())

    def mask(self, seen: Tensor) -> BlockMask:
        """That of a table whose last mask nobody holds: one that is held keeps its padding."""
        with self._lock:
            found = next((each for each in self._tables if each.free), None)
            if found is None:
                found = _Table(len(seen), seen.device)
                self._tables = [*self._tables[1 - _TABLES :], found]
            return found.write(seen)


_batches: Lru[tuple[int, torch.device, int], _Batch] = Lru(16)


def is_few(seen: Tensor) -> bool:
    """True of padding for `padded_mask`: a plain tensor of few keys, without gradients."""
    return 0 < seen.numel() <= FEW_KEYS and type(seen) is Tensor and not torch.is_grad_enabled()


def padded_mask(seen: Tensor, at: int) -> BlockMask | None:
    """The mask of one new row that sees every key but those where `seen` is False.

    seen: as `is_few` has it, bool [B, keys]. at: the row's position. None where `seen` is checked
    and removes nothing: a row that does not follow the last one is checked, which waits for the
    device. The lists are those of other masks, too, and not to be written to.
    """
    batch = _batch_of(seen)
    if not 0 <= at - batch.last_row <= 1 and bool(seen.all()):
        batch.last_row = _CHECK
        return None
    batch.last_row = at
    return batch.mask(seen)


def _batch_of(seen: Tensor) -> _Batch:
    stream = raw_stream(seen.get_device()) if seen.is_cuda else 0
    key = len(seen), seen.device, stream
    batch = _batches.get(key)
    if batch is None:
        batch = _Batch()
        _batches.put(key, batch)
    return batch


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


# Keys that a padding has room for beside those of its first step.
_ROOM = 1024


class _Padding(NamedTuple):
    """A padding and its masks, which nobody writes to.

    table: bool [B, room], True behind the keys of the step that it was made in; masks read it.
    """

    table: Tensor
    masks: _Masks

    def is_of(self, seen: Tensor) -> bool:
        """True where `seen` removes these keys and no others; waits for the device."""
        length = seen.shape[1]
        return length <= self.table.shape[1] and torch.equal(seen, self.table[:, :length])


def decoding_mask(seen: Tensor) -> BlockMask | None:
    """The mask of one new row that sees every key but those where `seen` is False.

    seen [B, keys], bool. None where it removes nothing. Who asks again on the same stream gets the
    same object, not to be written to. It waits for the device once, and twice for a new padding.
    """
    batch = _batch_of(seen)
    known = batch.padding
    if known is not None and known.is_of(seen):
        return known.masks.of(seen.shape[1])
    if bool(seen.all()):
        return None
    # Of tensors made in inference mode autograd can save none.
    with torch.inference_mode(False):
        room = -(-(seen.shape[1] + _ROOM) // KEY_BLOCK) * KEY_BLOCK
        table = seen.new_ones((len(seen), room))
        table[:, : seen.shape[1]] = seen
    kept = _reads(table)

    def listed(blocks: int) -> BlockMask:
        return few_rows(kept, len(table), 1, blocks * KEY_BLOCK, table.device)

    known = batch.padding = _Padding(table, _Masks(listed))
    return known.masks.of(seen.shape[1])
