"""static_mask(): the mask of one new row of a static cache, in few operations and without a wait.

`generate` makes the masks of such a cache in every step, outside of the graph that it compiles.
All that changes from step to step is in tensors of the same sizes: a Python number would be an
input of the graph, of which torch records another CUDA graph for each value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from flexattn import catalogue
from flexattn.block_mask.few_rows import KEY_BLOCK, few_rows, queue_of, with_lists
from flexattn.util.lru import Lru

MaskFunction = Callable[..., Tensor]
# Keys of all batches that a GPU reads in the time that it takes to find where padding ends.
FEW_KEYS = 8192


class _Tables(NamedTuple):
    """What the steps of a cache of so many keys have in common; nobody writes to it.

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
        with torch.inference_mode(False):
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


# Memory that another stream writes is not read.
_tables: Lru[tuple[int, int, torch.device, int], _Tables] = Lru(16)


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

    Blocks are listed that the row may see something of. Of a function that is known to see no key
    after the row, and has all keys near, these are the blocks up to the row, of more than FEW_KEYS
    keys from the first one on that is seen, and no element is evaluated for them.
    """
    here = None if seen is None else seen[:, offset : offset + keys].to(torch.bool)
    if not (not_after(mask_function) and near):
        # Of a cache that grows as well, to whose next length no tables would be of use.
        kept = None if here is None else pad(here, (0, keys - here.shape[1]))
        mask_mod = _moved(mask_function, _own(at, device), _number(offset, device))
        return few_rows(_padded(mask_mod, kept), B, 1, keys, device)
    tables = _known(B, keys, device)
    kept = None
    if here is not None:
        kept = torch.cat((here, tables.unseen[:, here.shape[1] :]), 1)
    if isinstance(at, Tensor) and not offset:
        place = tables.places.index_select(0, at.view(1))
        mask_mod = _padded(_placed(mask_function, place[0, 0]), kept)
        lists = _lists(tables, place[:, 4:], kept if B * keys > FEW_KEYS else None)
        return with_lists((1, keys), lists, mask_mod)
    mask_mod = _moved(mask_function, _own(at, device), _number(offset, device))
    mask_mod = _padded(mask_mod, kept)
    if isinstance(at, Tensor):
        return few_rows(mask_mod, B, 1, keys, device)
    blocks = min(max((at - offset) // KEY_BLOCK + 1, 0), tables.order.shape[3])
    lists = _lists(tables, tables.counts[blocks, :1], None)
    return with_lists((1, keys), lists, mask_mod)


def not_after(mask_function: Any) -> bool:
    """Whether a function is known to see no key after its row: False where nothing tells.

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


def _known(B: int, keys: int, device: torch.device) -> _Tables:
    device, stream, capturing = queue_of(device)
    key = B, keys, device, stream
    found = None if capturing else _tables.get(key)
    if found is None:
        found = _Tables.of(B, keys, device)
        # A tensor of another class, as of a trace, is of no use to others.
        if not capturing and type(found.order) is Tensor:
            _tables.put(key, found)
    return found


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


def _moved(mask_function: MaskFunction, first: Tensor, offset: Tensor) -> MaskFunction:
    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + first, kv_idx + offset)

    return moved


def _padded(whole: MaskFunction, kept: Tensor | None) -> MaskFunction:
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
