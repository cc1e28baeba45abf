"""Lists of blocks: written row by row, read back, made by key when asked, and of a few query rows.

Lists by key are read by a backward and by torch's kernels alone. At a million tokens each pair of
them is as large as the lists by query, and torch's way to make them needs several times that. A
mask of `lazy_mask` is of torch's own type: whatever knows BlockMask, as pytree and torch.export
may, knows it. It lacks the four attributes until one of them is read, and torch's class, which has
none of these names, makes them then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.classify import FULL, PARTIAL
from flexattn.problem.mask_lists import keep_class
from flexattn.runtime.launch import raw_stream
from flexattn.util.ambient import without_modes
from flexattn.util.locks import Lru

# Blocks that are listed at a time: their places take some 30 bytes each. A kernel of its own would
# be faster at a million tokens, and cost every process that makes a mask a second compile.
_CHUNK = 2**21


def lists_of(
    parts: Iterable[tuple[int, Tensor]],
    shape: tuple[int, int, int, int],
    device: torch.device,
    separate: bool = True,
) -> tuple[Tensor, ...]:
    """Counts and indices of partial blocks and, where `separate`, of full ones, as torch has them.

    parts: kinds int8 [rows, kv blocks] with their first row, counted over B, H and q blocks.
    shape: B, H, q blocks, kv blocks. Counts are int32 [B, H, q blocks]. Indices are int32 of
    `shape`: those listed, in order, and then the others, in order.
    """
    lists: list[Tensor] = []
    for _ in range(1 + separate):
        lists.append(torch.zeros(shape[:3], dtype=torch.int32, device=device))
        lists.append(torch.empty(shape, dtype=torch.int32, device=device))
    for first, kinds in parts:  # none where there are no blocks
        rows = slice(first, first + kinds.shape[0])
        some = tuple(each.view(-1, *each.shape[3:])[rows] for each in lists)
        _write(kinds, some, separate)
    return tuple(lists)


def transposed(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Lists of the rows [..., rows] of each column, from those of the columns of each row.

    indices [..., rows, columns] holds every column once, as `lists_of` leaves it.
    """
    *batch, rows, columns = indices.shape
    if not indices.numel():
        return counts.new_zeros([*batch, columns]), indices.new_zeros([*batch, columns, rows])
    kinds = torch.zeros(indices.shape, dtype=torch.int8, device=indices.device)
    dense, flat = kinds.view(-1, columns), indices.reshape(-1, columns)
    here = torch.arange(columns, device=indices.device)
    step = max(1, _CHUNK // max(columns, 1))
    for first in range(0, dense.shape[0], step):
        part = slice(first, first + step)
        listed = here < counts.reshape(-1, 1)[part]
        dense[part].scatter_(1, flat[part].long(), listed.to(torch.int8))
    swapped = kinds.transpose(-2, -1).reshape(-1, rows)
    one, other = lists_of([(0, swapped)], (1, 1, *swapped.shape), indices.device, separate=False)
    return one.view(*batch, columns), other.view(*batch, columns, rows)


def _write(kinds: Tensor, lists: tuple[Tensor, ...], separate: bool) -> None:
    step = max(1, _CHUNK // kinds.shape[1])
    for first in range(0, kinds.shape[0], step):
        part = slice(first, first + step)
        some = kinds[part]
        _ordered(some == PARTIAL if separate else some != 0, lists[0][part], lists[1][part])
        if separate:
            _ordered(some == FULL, lists[2][part], lists[3][part])


def _ordered(listed: Tensor, counts: Tensor, indices: Tensor) -> None:
    """Each column's place among the listed ones, or behind them among the others."""
    until = listed.cumsum(1, dtype=torch.int32)
    total = until[:, -1:]
    here = torch.arange(listed.shape[1], dtype=torch.int32, device=listed.device)
    place = torch.where(listed, until - 1, (total + here).sub_(until))
    counts.copy_(total[:, 0])
    indices.scatter_(1, place.long(), here.expand_as(indices))


_NAMES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


class _Beside(NamedTuple):
    """The data of this library in a torch BlockMask. To unpickle it imports this module."""

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
    """True if a mask's lists by key are not made yet."""
    return "q_num_blocks" not in mask.__dict__ or "q_indices" not in mask.__dict__


def decided(mask: BlockMask) -> bool:
    """True if a mask's lists are known to hold only what mask_mod keeps."""
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


# Rows whose elements are evaluated one by one: what decoding has, drafts and trees included.
MOST_ROWS = 16
# Keys of a block of its lists.
KEY_BLOCK = 128
# Of a row that keeps most blocks, as that of a causal mask does.
_CLASS = "d1 i1 runs"
_Positions = tuple[Tensor, Tensor, Tensor, Tensor]
_T = TypeVar("_T", bound=tuple[Any, ...])
# Made once for the steps of a cache whose size stays; memory of another stream is not read.
_kept: Lru[tuple[Any, ...], Any] = Lru(16)


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
    """The arguments of a mask_mod for all elements at once: b, h, q_idx and kv_idx.

    int64 [B, 1, 1], [], [1, Q_LEN, 1] and [KV_LEN, up to whole blocks], where the last key stands
    for those past it. Not to be written to: who asks again on the same stream gets the same.
    """
    return kept_tensors(_made_positions, (B, Q_LEN, KV_LEN), device)


def _made_positions(B: int, Q_LEN: int, KV_LEN: int, device: torch.device) -> _Positions:
    b, q_idx, kv_idx = (
        torch.arange(size, device=device)
        for size in (B, Q_LEN, -(-KV_LEN // KEY_BLOCK) * KEY_BLOCK)
    )
    kv_idx = kv_idx.clamp(max=KV_LEN - 1)
    return b.view(-1, 1, 1), kv_idx[0], q_idx.view(1, -1, 1), kv_idx


def kept_tensors(
    make: Callable[..., _T],
    sizes: tuple[Any, ...],
    device: torch.device,
    kept: Lru[tuple[Any, ...], Any] = _kept,
) -> _T:
    """The tensors of make(*sizes, device), the same for every call on one stream.

    The last one is a tensor; the caller writes to none. kept: where they are kept.
    Those of a graph's capture or of a trace are not kept.
    """
    device, stream, capturing = queue_of(device)
    key = make, sizes, device, stream
    found: _T | None = None if capturing else kept.get(key)
    if found is None:
        # What is made in inference mode could not be read by a graph that is differentiated.
        with torch.inference_mode(False):
            found = make(*sizes, device)
        # A tensor of another class, as of a trace, is of no use to others.
        if not capturing and type(found[-1]) is Tensor:
            kept.put(key, found)
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
