"""The kind of each block of a mask, empty, partial or full: by bounds, by elements where open.

A causal mask of 1M x 1M has 67M blocks, and all but 8192 of them follow from their corners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.device import Device, detect
from flexattn.errors import InputError
from flexattn.kernels.base.arguments import captured_values
from flexattn.kernels.base.source import Source
from flexattn.kernels.block_mask.source import STRIP, render_block_mask, table_values
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Bound
from flexattn.mods.algebra import Bounds, SearchTable, bounds_of, tables_of, verdicts
from flexattn.problem import Captures, all_captures
from flexattn.runtime.build import Launcher, builder
from flexattn.runtime.launch import raw_stream

EMPTY, PARTIAL, FULL = 0, 1, 2
_OPEN = 3
# Blocks whose kinds a GPU holds at a time on the way to the lists, and elements and blocks that
# the CPU path works on at a time.
_SLAB, _CHUNK, _TILES = 2**25, 2**20, 2**18
# The CPU path first decides squares of so many blocks, where there are more than _FEW.
_COARSE, _FEW = 16, 2**12
# A GPU looks at blocks up to this size as they are.
_LARGE = 2**12
# Elements of an open block that are looked at before all of it: so many rows, and keys.
_SAMPLED = 4


def block_kinds(
    bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Tensor:
    """The kind of each block, EMPTY, PARTIAL or FULL: int8 [B, H, q_blocks, kv_blocks].

    A block that reaches past a length is never FULL, as in torch.
    """
    B, H, q_len, kv_len = sizes
    shape = (B, H, -(-q_len // block[0]), -(-kv_len // block[1]))
    kinds = torch.empty(shape, dtype=torch.int8, device=device)
    rows = kinds.view(shape[0] * shape[1] * shape[2], shape[3])
    for first, found in kinds_by_rows(bound, sizes, block, device):
        rows[first : first + found.shape[0]] = found
    return kinds


def kinds_by_rows(
    bound: Bound, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """block_kinds, some rows at a time: the first row, and kinds int8 [rows, kv_blocks].

    Rows are counted over B, H and q_blocks. A GPU decides all of a row's blocks by their bounds,
    and evaluates the elements of those that are left open, in one kernel; the CPU decides squares
    of blocks, then the blocks of open squares, and evaluates elements some blocks at a time.
    """
    B, H, q_len, kv_len = sizes
    rows, columns = B * H * -(-q_len // block[0]), -(-kv_len // block[1])
    if not rows or not columns:
        return
    if device.type != "cuda":
        bound = bound._replace(tensors=tuple(each.cpu() for each in bound.tensors))
        yield 0, _Host(bound, sizes, block).kinds().view(rows, columns).to(device)
        return
    classifier = BlockClassifier(bound, sizes, _looked_at(block, sizes), device)
    slab = max(1, _SLAB // columns)
    kinds = torch.empty(min(slab, rows), columns, dtype=torch.int8, device=device)
    for first in range(0, rows, slab):
        part = kinds[: rows - first]
        classifier.run(part, first)
        yield first, part


def _looked_at(block: tuple[int, int], sizes: tuple[int, int, int, int]) -> tuple[int, int]:
    """The block for a kernel, which walks all of it, and counts its elements in 32 bits.

    One that reaches far past a length ends sooner, still past it. Raises InputError for a block
    that is too large all the same.
    """
    q_block, kv_block = (
        min(size, max(_LARGE, 1 << length.bit_length()))
        for size, length in zip(block, sizes[2:], strict=True)
    )
    if q_block * kv_block >= 2**31:
        raise InputError(
            f"BLOCK_SIZE={block} for lengths {sizes[2:]}",
            "a kernel counts the elements of a block in 32 bits",
            "use smaller blocks: 128 is what kernels like",
        )
    return q_block, kv_block


@dataclass(frozen=True, slots=True)
class _Host:
    """The CPU path for one mask; a tile is told by its b, h, row and column."""

    bound: Bound
    sizes: tuple[int, int, int, int]
    block: tuple[int, int]

    def kinds(self) -> Tensor:
        """int8 [B, H, q_blocks, kv_blocks]."""
        names = self.bound.mod.expr.variables
        B, H = (self.sizes[i] if name in names else 1 for i, name in enumerate("bh"))
        blocks = [-(-self.sizes[2 + i] // self.block[i]) for i in range(2)]
        bounds = bounds_of(self.bound.mod)
        tables = tables_of(bounds.tables, self.bound.tensors)
        step = _COARSE if blocks[0] * blocks[1] > _FEW else 1
        kinds = torch.full((B, H, *(-(-n // step) for n in blocks)), _OPEN, dtype=torch.int8)
        _decide(kinds, _TILES, lambda tiles: self._bounded(tiles, step, bounds, tables))
        if step > 1:
            kinds = kinds.repeat_interleave(step, 2)[:, :, : blocks[0]]
            kinds = kinds.repeat_interleave(step, 3)[:, :, :, : blocks[1]].contiguous()
            _decide(kinds, _TILES, lambda tiles: self._bounded(tiles, 1, bounds, tables))
        _decide(kinds, max(1, _CHUNK // _SAMPLED**2), self._sampled)
        _decide(kinds, max(1, _CHUNK // math.prod(self._spans)), self._exact)
        for dim, count in enumerate(blocks):
            if self.sizes[2 + dim] % self.block[dim]:
                last = kinds.select(2 + dim, count - 1)
                last.copy_(last.clamp(max=PARTIAL))
        return kinds.expand(*self.sizes[:2], *blocks).contiguous()

    @property
    def _spans(self) -> tuple[int, int]:
        """Rows and keys of a block that may lie within the lengths."""
        return min(self.block[0], self.sizes[2]), min(self.block[1], self.sizes[3])

    def _bounded(
        self, tiles: list[Tensor], step: int, bounds: Bounds, tables: tuple[SearchTable, ...]
    ) -> Tensor:
        """The kinds of squares of step x step blocks, _OPEN where the bounds do not say."""
        b, h, *places = tiles
        corners = {"b": b, "h": h}
        for name, at, size, length in zip(
            ("q", "kv"), places, self.block, self.sizes[2:], strict=True
        ):
            corners[f"{name}_lo"] = at * (size * step)
            corners[f"{name}_hi"] = ((at + 1) * (size * step)).clamp(max=length) - 1
        must, may = verdicts(bounds, corners, self.bound.tensors, self.bound.scalars, tables)
        kinds = torch.where(must, FULL, torch.where(may, _OPEN, EMPTY)).to(torch.int8)
        return kinds.expand(b.shape)

    def _sampled(self, tiles: list[Tensor]) -> Tensor:
        """PARTIAL where some elements are kept and others are not, else _OPEN."""
        lanes = []
        for at, size, length in zip(tiles[2:], self.block, self.sizes[2:], strict=True):
            first = at * size
            span = ((at + 1) * size).clamp(max=length) - 1 - first
            lanes.append(first[:, None] + span[:, None] * torch.arange(_SAMPLED) // (_SAMPLED - 1))
        keep = self._keep(tiles, *lanes).flatten(1)
        return torch.where(keep.any(1) & ~keep.all(1), PARTIAL, _OPEN).to(torch.int8)

    def _exact(self, tiles: list[Tensor]) -> Tensor:
        """The kinds of blocks by each of their elements; what lies past a length is not kept.

        The mask is asked there as at the last position: the zero that a captured tensor has past
        its end may be what the mask divides by.
        """
        q_idx, kv_idx = (
            (at * size)[:, None] + torch.arange(span)
            for at, size, span in zip(tiles[2:], self.block, self._spans, strict=True)
        )
        inside = (q_idx < self.sizes[2])[:, :, None] & (kv_idx < self.sizes[3])[:, None, :]
        last = (length - 1 for length in self.sizes[2:])
        places = (at.clamp(max=end) for at, end in zip((q_idx, kv_idx), last, strict=True))
        keep = (self._keep(tiles, *places) & inside).flatten(1)
        return keep.any(1).to(torch.int8) + keep.all(1).to(torch.int8)

    def _keep(self, tiles: list[Tensor], q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The mask at queries [tiles, m] and keys [tiles, n]: bool [tiles, m, n]."""
        env = dict(zip("bh", (at[:, None, None] for at in tiles[:2]), strict=True))
        env |= {"q_idx": q_idx[:, :, None], "kv_idx": kv_idx[:, None, :]}
        keep = evaluate(self.bound.mod, env, self.bound.tensors, self.bound.scalars)
        return keep.expand(len(tiles[0]), q_idx.shape[1], kv_idx.shape[1])


def _decide(kinds: Tensor, most: int, rule: Callable[[list[Tensor]], Tensor]) -> None:
    """Give open tiles, of [B, H, rows, columns], the kind that a rule finds, `most` at a time.

    rule: of the b, h, row and column of tiles.
    """
    flat, (_, heads, rows, columns) = kinds.view(-1), kinds.shape
    for some in torch.nonzero(flat == _OPEN)[:, 0].split(most):
        rest, column = some // columns, some % columns
        rest, row = rest // rows, rest % rows
        flat[some] = rule([rest // heads, rest % heads, row, column])


class BlockClassifier:
    """The kernel of one mask, with what it captures now and the tables that its bounds read.

    On the CPU the kernel runs in Triton's interpreter.
    """

    def __init__(
        self,
        bound: Bound,
        sizes: tuple[int, int, int, int],
        block: tuple[int, int],
        device: torch.device,
    ) -> None:
        # A number on the CPU may stand for a captured tensor without dimensions.
        bound = bound._replace(tensors=tuple(each.to(device) for each in bound.tensors))
        self._target, self._index = _place(device)
        self._captures = all_captures(bound)
        self._source = _mask_source(self._captures, block, self._target)
        _, heads, q_len, kv_len = sizes
        bounds = bounds_of(bound.mod)
        self._tables: tuple[SearchTable, ...] = tables_of(bounds.tables, bound.tensors)
        self._given: dict[str, Any] = {
            "H": heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "q_blocks": -(-q_len // block[0]),
            "kv_blocks": -(-kv_len // block[1]),
            **captured_values(self._captures, bound),
        }
        for number, (use, table) in enumerate(zip(bounds.tables, self._tables, strict=True)):
            self._given |= table_values(number, use, table)

    def run(self, kinds: Tensor, first_row: int) -> None:
        """Write kinds int8 [rows, kv blocks], contiguous; rows are counted over B, H, q blocks."""
        rows, columns = kinds.shape
        programs = rows * -(-columns // STRIP)
        given = {"KINDS": kinds, "first_row": first_row, **self._given}
        kernel = builder().kernel(self._source, self._target, self._index)
        launch(kernel.prepare(programs, {}, list(given)), self._index, list(given.values()))


def _mask_source(captures: Captures, block: tuple[int, int], target: Device) -> Source:
    key = ("blocks", captures.mod.fingerprint, captures.contiguous, block, target.name)
    (found,) = builder().sources(key, lambda: (render_block_mask(captures, *block, target),))
    return found


def _place(device: torch.device) -> tuple[Device, int]:
    if device.type != "cuda":
        return detect(device), -1
    return detect(device), torch.cuda.current_device() if device.index is None else device.index


def launch(launcher: Launcher, index: int, given: Sequence[Any]) -> None:
    """Launch on a GPU's current stream, or for -1 in the interpreter."""
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return launch(launcher, index, given)
    launcher.launch(raw_stream(index) if index >= 0 else -1, given)
