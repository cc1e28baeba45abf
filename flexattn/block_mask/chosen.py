"""The lists of a BlockMask whose blocks were chosen by data, made on the device without a wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexattn.block_mask.classify import FULL, PARTIAL, launch
from flexattn.block_mask.lists import lazy_mask, lists_of
from flexattn.device import detect
from flexattn.kernels.base.config import power_above
from flexattn.kernels.block_mask.source import (
    MOST_CHOSEN,
    ChosenForm,
    render_by_key,
    render_chosen,
    render_mapped,
)
from flexattn.problem.mask_lists import (
    DENSITY_STEPS,
    dense_blocks,
    keep_class,
    keep_form,
    shared_form,
)
from flexattn.runtime.build import Launcher, blank, builder
from flexattn.runtime.key_lists import turn_by
from flexattn.runtime.launch import Lists, launches
from flexattn.settings import current

_Places = tuple[tuple[int], tuple[Any, ...]]


class ChosenBlocks(NamedTuple):
    """Blocks of `keys` keys that each block of `rows` rows chose.

    indices int32 or int64 [B or 1, heads, blocks of rows, k]: in any order; what is below 0, past
    the keys or given twice counts once or not at all. counts int32 [B or 1, heads, blocks of
    rows]: how many of them are valid, or None. heads: 1, or a divisor of Hq. masked: a mask
    decides within blocks; causal: it is q_idx >= kv_idx.
    """

    indices: Tensor
    counts: Tensor | None
    rows: int
    keys: int
    masked: bool
    causal: bool

    def mask(
        self, Hq: int, lengths: tuple[int, int], mask_mod: Callable[..., Tensor]
    ) -> BlockMask:
        """The mask of these blocks, with lists of [B or 1, Hq or 1, blocks of rows].

        Full blocks are those that mask_mod cannot change and no length cuts. Lists by key are
        made of those by query when a backward reads them.
        """
        heads = Hq if self.indices.shape[1] > 1 else 1
        if not self._by_kernel:
            lists = self.by_torch(heads, lengths)
            mask = lazy_mask(lists, (self.rows, self.keys), mask_mod, lengths)
            keep_class(mask, _class_of(self.indices.shape[3], -(-lengths[1] // self.keys)))
            keep_form(mask)
            return mask
        index = self.indices.get_device()
        made = self._made(heads, lengths, index)
        num, idx, full_num, full_idx = given = _empty(made.places, index)
        counts = () if self.counts is None else (self.counts,)
        launch(made.launcher, index, (self.indices, *counts, *given))
        mask = BlockMask.__new__(BlockMask)
        known = mask.__dict__
        known.update(made.known)
        known["kv_num_blocks"], known["kv_indices"] = num, idx
        known["full_kv_num_blocks"], known["full_kv_indices"] = full_num, full_idx
        known["mask_mod"] = mask_mod
        keep_form(mask, made.form)
        return mask

    @property
    def _by_kernel(self) -> bool:
        fits = 0 < self.indices.numel() and self.indices.shape[-1] <= MOST_CHOSEN
        return fits and (self.indices.is_cuda or current().interpret)

    def _made(self, heads: int, lengths: tuple[int, int], index: int) -> _Made:
        indices, counts = self.indices, self.counts
        B, given_heads, rows, k = shape = indices.shape
        key = (
            "chosen", shape, indices.dtype, counts is None, *self[2:], heads, lengths, index,
        )  # fmt: skip
        found: _Made | None = launches.get(key)
        if found is None:
            form = ChosenForm(
                self.rows, self.keys, power_above(k), str(indices.dtype).removeprefix("torch."),
                counts is not None, self.masked, self.causal,
            )  # fmt: skip
            q_len, kv_len = lengths
            blocks, target = -(-kv_len // self.keys), detect(indices.device)
            fixed = {
                "Hq": heads, "heads": given_heads, "rows": rows, "k": k, "kv_blocks": blocks,
                "q_len": q_len, "kv_len": kv_len,
            }  # fmt: skip
            names = ("NUM", "IDX", "FULL_NUM", "FULL_IDX")
            by_query = ("INDICES", *("COUNTS",) * (counts is not None), *names)
            by_key = (*names, "Q_NUM", "Q_IDX", "FULL_Q_NUM", "FULL_Q_IDX")
            kernels = [
                builder().kernel(source, target, index)
                for source in (render_chosen(form, target), render_by_key(form.width, target))
            ]
            few = {name: fixed[name] for name in ("rows", "k", "kv_blocks")}
            turn = _Turn(
                kernels[1].prepare(B * heads * blocks, few, by_key), (B, heads, rows, k),
                _places((B, heads, blocks), rows),
            )  # fmt: skip
            places = _places((B, heads, rows), k)
            # Its lists are not kept, only its other attributes.
            first = lazy_mask(
                tuple(x.to("meta") for x in _empty(places, index)),
                (self.rows, self.keys), noop_mask, lengths,
            )  # fmt: skip
            keep_class(first, _class_of(k, blocks))
            turn_by(first, turn)
            found = _Made(
                kernels[0].prepare(B * heads * rows, fixed, by_query), places,
                shared_form(first), first.__dict__,
            )  # fmt: skip
            launches.put(key, found)
        return found

    def by_torch(self, heads: int, lengths: tuple[int, int]) -> tuple[Tensor, ...]:
        """The lists by query by plain torch: on the CPU, and of long choices."""
        q_len, kv_len = lengths
        rows, columns = self.indices.shape[2], -(-kv_len // self.keys)
        listed = dense_choices(self.indices, self.counts, columns)
        row = torch.arange(rows, device=listed.device)[:, None] * self.rows
        column = torch.arange(columns, device=listed.device) * self.keys
        whole = (row + self.rows <= q_len) & (column + self.keys <= kv_len)
        whole = whole & (self.causal or not self.masked)
        if self.causal:
            listed = listed & (column < (row + self.rows).clamp(max=q_len))
            whole = whole & (column + self.keys <= row + 1)
        kinds = listed.to(torch.int8) * torch.where(whole, FULL, PARTIAL).to(torch.int8)
        kinds = kinds.repeat_interleave(heads // listed.shape[1], 1)
        B, H, _, _ = kinds.shape
        shape = B, H, rows, columns
        parts = [(0, kinds.reshape(-1, columns))] if kinds.numel() else []
        return lists_of(parts, shape, kinds.device)


# Of a map that a kernel makes: comparisons of a row.
_MOST_COMPARED = 2**16


def map_choices(
    indices: Tensor,
    counts: Tensor | None,
    rows: int,
    unit: int,
    lengths: tuple[int, int],
    heads: int,
    causal: bool,
    block: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]] | None:
    """Choices as a bool map [B, heads given, blocks of rows, units] by one launch, with lists.

    These are counts and indices of blocks of `block` keys that some row of a block of as many
    chose, of `heads` heads. None where a kernel does not make them: of sizes that do not divide a
    block, of many choices, and on a CPU.
    """
    B, given, blocks_of_rows, k = indices.shape
    units, (blocks, kv_blocks) = -(-lengths[1] // unit), [-(-each // block) for each in lengths]
    whole = block % rows == 0 == block % unit and unit >= 16
    if not whole or not indices.numel() or not units or k * units > _MOST_COMPARED:
        return None
    if not (indices.is_cuda or current().interpret):
        return None
    index, where = indices.get_device(), indices.device
    key = (
        "map",
        indices.shape,
        indices.dtype,
        counts is None,
        rows,
        unit,
        lengths,
        heads,
        causal,
        index,
    )
    launcher: Launcher | None = launches.get(key)
    if launcher is None:
        target, dtype = detect(where), str(indices.dtype).removeprefix("torch.")
        source = render_mapped(rows, unit, block, dtype, counts is not None, causal, target)
        fixed = {
            "group": heads // given, "rows": blocks_of_rows, "k": k, "units": units,
            "blocks": blocks, "kv_blocks": kv_blocks,
        }  # fmt: skip
        names = ("INDICES", *("COUNTS",) * (counts is not None), "MAP", "NUM", "IDX")
        kernel = builder().kernel(source, target, index)
        launcher = kernel.prepare(B * given * blocks, fixed, names)
        launches.put(key, launcher)
    found = torch.empty((B, given, blocks_of_rows, units), dtype=torch.bool, device=where)
    num = torch.empty((B, heads, blocks), dtype=torch.int32, device=where)
    idx = torch.empty((B, heads, blocks, kv_blocks), dtype=torch.int32, device=where)
    told = () if counts is None else (counts.to(torch.int32).contiguous(),)
    launch(launcher, index, (indices.contiguous(), *told, found, num, idx))
    return found, (num, idx)


def dense_choices(indices: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """Choices as a bool map [B, heads, rows, columns]; see ChosenBlocks for what counts."""
    if counts is None:
        counts = torch.full(indices.shape[:-1], indices.shape[-1], device=indices.device)
    return dense_blocks(counts, indices, columns)


@dataclass(frozen=True)
class _Turn:
    """Makes lists by key, at `places`, of lists by query with indices of `shape`."""

    launcher: Launcher
    shape: tuple[int, ...]
    places: _Places

    def __call__(self, by_query: Lists) -> Lists | None:
        """None if somebody has given the mask lists of another shape."""
        if by_query.kv_idx.shape != self.shape or by_query.full_idx is None:
            return None
        gpu = by_query.kv_idx.get_device()
        found = _empty(self.places, gpu)
        launch(self.launcher, gpu, (*by_query[:4], *found))
        return Lists(*found)


class _Made(NamedTuple):
    """The attributes that masks of one form share.

    These are the kernel of their lists, and all attributes except lists and mask_mod.

    places: of the lists in their memory. form: as of `shared_form`. known: a mask's attributes.
    """

    launcher: Launcher
    places: _Places
    form: tuple[Any, ...]
    known: dict[str, Any]


def _class_of(k: int, blocks: int) -> str:
    """The class of a mask that lists k of so many blocks, apart from each other; unread."""
    density = 0
    while density < DENSITY_STEPS and k << (density + 1) <= blocks:
        density += 1
    return f"d1/{2**density} i1 gaps" if density else "d1 i1 gaps"


def _empty(places: _Places, index: int) -> tuple[Tensor, ...]:
    """Uninitialised lists of partial and full blocks, in one piece of a device's memory.

    Each mask has new ones, and torch's own functions would take 14 us for them, not 3.
    """
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return _empty(places, index)
    words, (num, full_num, idx, full_idx) = places
    own: Any = torch._C._dynamo.guards
    held, part = blank(index)(words, (1,), torch.int32), own._reinterpret_tensor
    return part(held, *num), part(held, *idx), part(held, *full_num), part(held, *full_idx)


def _places(shape: tuple[int, int, int], width: int) -> _Places:
    """The words of such memory; of each list its shape, strides and first word, counts first.

    shape: of the counts. width: of a row of indices.
    """
    B, H, rows = shape
    lines = B * H * rows
    num, idx = (
        (shape, (H * rows, rows, 1)),
        ((*shape, width), (H * rows * width, rows * width, width, 1)),
    )
    first = 0, lines, 2 * lines, (2 + width) * lines
    found = tuple((*form, at) for form, at in zip((num, num, idx, idx), first, strict=True))
    return (2 * lines * (1 + width),), found
