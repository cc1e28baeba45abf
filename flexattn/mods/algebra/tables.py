"""verdicts(): a mod's bounds on many tiles at once, with torch, on any device.

They read tables: the least and the greatest value of a captured tensor over any range of an index.
Level k of a table holds the extremes of every 2**k neighbours, so two entries answer any range. A
sorted tensor needs no level but itself: its extremes are at the ends of a range. Made anew in
each call, on the tensor's device: what a tensor holds may change from call to call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.mods.algebra.lower import Bounds, TableUse
from flexattn.mods.expr import Expr, computed, walk
from flexattn.mods.ops import dtype_of

# A tensor that is not sorted is first cut into pieces, of which a tile holds whole ones, until
# this many are left; a short one is not.
_PIECES, _SHORT = 2**20, 2**12


@dataclass(frozen=True, slots=True)
class Extremes:
    """Extremes of a captured tensor, contiguous, with the searched dimension last.

    least, most: [levels, ..., pieces], in the tensor's dtype. A piece is 2**shift neighbours.
    """

    least: Tensor
    most: Tensor
    shift: int

    @property
    def levels(self) -> int:
        """How many levels there are."""
        return int(self.least.shape[0])


def tables_of(
    uses: Sequence[TableUse], tensors: Sequence[Tensor], tile: tuple[int, int]
) -> tuple[Extremes, ...]:
    """The tables that a mod's bounds read, for tiles of (query rows, keys).

    Asks the device once whether the tensors that are searched are sorted, unless a CUDA graph is
    being captured: then none counts as sorted.
    """
    moved = [_arranged(tensors[use.slot], use.dim) for use in uses]
    searched = [i for i, use in enumerate(uses) if use.dim >= 0]
    ordered = dict(zip(searched, _sorted([moved[i] for i in searched]), strict=True))
    shift = _trailing_zeros(math.gcd(*tile))
    return tuple(
        Extremes(values[None], values[None], 0)
        if ordered.get(i, True)
        else _levels(values, min(shift, 7))
        for i, values in enumerate(moved)
    )


def _arranged(tensor: Tensor, dim: int) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)  # of which extremes can be taken
    if tensor.dim() and dim >= 0:
        tensor = tensor.movedim(dim, -1)
    if not tensor.numel():
        return tensor.new_zeros([max(size, 1) for size in tensor.shape])
    return tensor.contiguous()


def _sorted(tensors: list[Tensor]) -> list[bool]:
    if not tensors:
        return []
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return [False] * len(tensors)
    answers = []
    for values in tensors:
        before, after = values[..., :-1], values[..., 1:]
        answers.append((before <= after).all() | (before >= after).all())
    found: list[bool] = torch.stack(answers).tolist()
    return found


def _levels(values: Tensor, shift: int) -> Extremes:
    count = values.shape[-1]
    if count <= _SHORT:
        shift = 0
    while values.numel() >> shift > _PIECES:
        shift += 1
    pieces = -(-count // 2**shift)
    if shift:
        rest = values[..., -1:].expand(*values.shape[:-1], pieces * 2**shift - count)
        parts = torch.cat([values, rest], -1).unflatten(-1, (pieces, 2**shift))
        least, most = [parts.amin(-1)], [parts.amax(-1)]
    else:
        least, most = [values], [values]
    for level in range(pieces.bit_length() - 1):
        for found, op in ((least, torch.minimum), (most, torch.maximum)):
            last = found[-1]
            # Past the end there is nothing more: such entries are never asked for.
            step = 2**level
            found.append(
                torch.cat([op(last[..., :-step], last[..., step:]), last[..., -step:]], -1)
            )
    return Extremes(torch.stack(least), torch.stack(most), shift)


def _trailing_zeros(value: int) -> int:
    return (value & -value).bit_length() - 1


def verdicts(
    bounds: Bounds,
    corners: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float | bool],
    tables: Sequence[Extremes],
) -> tuple[Tensor, Tensor]:
    """Whether every element of each tile is kept, and whether any may be.

    corners: int64 tensors named as in flexattn.mods.algebra.lower, which broadcast against one
    another. The results are bool, with the dimensions that they depend on.
    """
    device = next(iter(corners.values())).device
    found: dict[Expr, Tensor] = {}
    for node in walk(bounds.must, bounds.may):
        args = [found[arg] for arg in node.args]
        if node.op == "var":
            found[node] = corners[str(node.value)]
        elif node.op == "scalar":
            number = scalars[int(node.value or 0)]
            found[node] = torch.tensor(number, dtype=dtype_of(node.dtype), device=device)
        elif node.op == "size":
            slot, dim = map(int, str(node.value).split("."))
            found[node] = torch.tensor(tensors[slot].shape[dim], device=device)
        elif node.op in ("table_min", "table_max"):
            number = int(node.value or 0)
            searched = bounds.tables[number].dim
            read = _read(tables[number], args, searched, node.op == "table_max")
            found[node] = read.to(dtype_of(node.dtype))
        else:
            found[node] = computed(node, args, device)
    return found[bounds.must], found[bounds.may]


def _read(table: Extremes, places: list[Tensor], searched: int, greatest: bool) -> Tensor:
    values = table.most if greatest else table.least
    if searched < 0:
        return _at(values[0], places)
    *places, last = places
    first = places.pop(searched) >> table.shift
    last = last >> table.shift
    # Two runs of 2**level pieces cover the range from both ends.
    level = torch.frexp((last - first + 1).double()).exponent.long() - 1
    level = level.clamp(0, table.levels - 1)
    second = torch.maximum(last - (1 << level) + 1, first)
    ends = [_at(values, [level, *places, at]).to(torch.int64) for at in (first, second)]
    return torch.maximum(*ends) if greatest else torch.minimum(*ends)


def _at(values: Tensor, places: list[Tensor]) -> Tensor:
    if not places:
        return values
    found: Tensor = torch.ops.aten.index.Tensor(values, torch.broadcast_tensors(*places))
    return found
