"""bounds_of(): a mask's expression turned into two others, which decide a whole tile at once.

The first says that every element of the tile is kept, the second that some element may be. They
are expressions of the tile's corners (`q_lo`, `q_hi`, `kv_lo`, `kv_hi`, inclusive), of `b`, `h`,
and of the least and the greatest value of captured tensors over ranges of indices. Range
arithmetic (flexattn.mods.algebra.whole); sound, never exact by promise: no
element is kept where the second is false, and none is removed where the first is true.
verdicts() computes both for many tiles with torch, on any device.

The extremes of a sorted tensor are at the ends of a range; of another one nothing is known over a
range. Tables are made anew in each call, on the tensor's device: what a tensor holds may change
from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.mods.algebra import whole
from flexattn.mods.algebra.whole import (
    TRUE,
    Flag,
    Whole,
    both,
    settled,
)
from flexattn.mods.analysis.intervals import dtype_range
from flexattn.mods.expr import Expr, Mod, computed, const, integer, once, walk
from flexattn.mods.ops import dtype_of, is_int
from flexattn.mods.simplify import applied, clamped, make

# The variables of a tile's corners, each with the largest number that it has.
_LENGTH, _HEADS = 2**30, 2**20
CORNERS = {"b": _LENGTH, "h": _HEADS, **dict.fromkeys(("q_lo", "q_hi", "kv_lo", "kv_hi"), _LENGTH)}
# Numbers from memory and captured numbers beyond this decide nothing.
_REMEMBERED = 2**48
# Of these torch has no comparison to tell whether they are sorted.
_UNORDERED = ("uint16", "uint32", "uint64")


@dataclass(frozen=True, slots=True)
class TableUse:
    """A captured tensor whose extremes are asked for over a range of dimension `dim`.

    dim -1: it is read at single places alone, sorted or not.
    """

    slot: int
    dim: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Verdicts on a tile, as bool expressions of its corners.

    must: every element is kept. may: some element may be kept. `tables` are what the operations
    "table_min" and "table_max" read, by number: their operands are a position for each dimension,
    and the end of the range for the dimension that is searched. "table_sorted" says whether what
    they read of that is right.
    """

    must: Expr
    may: Expr
    tables: tuple[TableUse, ...]


@once
def bounds_of(mod: Mod) -> Bounds:
    """The verdicts of a mask_mod; worked out once for each mod."""
    return _Lowering().run(mod)


class _Lowering:
    """known: of each node a Flag or a Whole, by its dtype, or None, as of every float."""

    def __init__(self) -> None:
        self.known: dict[Expr, Any] = {}
        self.tables: dict[TableUse, int] = {}

    def run(self, mod: Mod) -> Bounds:
        for node in walk(mod.expr):
            args = [self.known.get(arg) for arg in node.args]
            if node.dtype == "bool":
                self.known[node] = self._flag(node, args)
            elif is_int(node.dtype) and node.dtype != "uint64":
                self.known[node] = self._whole(node, args)
        flag = self.known[mod.expr]
        return Bounds(flag.must, flag.may, tuple(self.tables))

    def _flag(self, node: Expr, args: list[Any]) -> Flag:
        if node.op == "const":
            return whole.known(const(bool(node.value), "bool"))
        if node.op == "scalar":
            return whole.known(node)
        if node.op == "load":
            return whole.nonzero(self._load(node, args))
        source = node.args[0].dtype
        if source == "bool":
            return whole.combine(node.op, args)
        return whole.nonzero(*args) if node.op == "cast" else whole.compare(node.op, args)

    def _whole(self, node: Expr, args: list[Any]) -> Whole | None:
        if node.op == "const":
            return Whole.of(int(node.value or 0))
        if node.op == "var":
            return _variable(str(node.value))
        if node.op == "scalar":
            number = make("cast", "int64", (node,))
            return _limited(number, number, node.dtype, TRUE)
        if node.op == "load":
            return self._load(node, args)
        source = node.args[0].dtype
        if node.op == "where":
            found = whole.choose(*args)
        elif node.op == "cast" and source == "bool":
            found = whole.of_flag(*args)
        else:
            found = whole.apply(node.op, args)
        return None if found is None else settled(found, node.dtype)

    def _load(self, node: Expr, indices: list[Whole | None]) -> Whole | None:
        """The entries of a captured tensor of integers between the ends of an index."""
        found = None if node.dtype in _UNORDERED else self._extremes(node, indices)
        return None if found is None else _limited(*found[:2], node.dtype, found[2])

    def _extremes(self, node: Expr, indices: list[Whole | None]) -> tuple[Expr, Expr, Expr] | None:
        """The least and the greatest entry between the ends of an index, and whether it is sure.

        A range of one index is searched; more than one decide something where they are points.
        """
        known = [index for index in indices if index is not None]
        if len(known) < len(indices):
            return None
        sizes = [Expr("size", "int64", (), f"{node.value}.{dim}") for dim in range(len(known))]
        ends = [_ends(index, size) for index, size in zip(known, sizes, strict=True)]
        wide = [dim for dim, (low, high) in enumerate(ends) if low is not high]
        searched = wide[0] if len(wide) == 1 else -1
        sure = [index.sure for index in known]
        places: list[Expr] = []
        for dim, ((low, high), size) in enumerate(zip(ends, sizes, strict=True)):
            sure.append(applied("lt", high, size))
            if known[dim].range[0] < 0:
                sure.append(applied("le", integer(0), low))
            if dim in wide and dim != searched:
                sure.append(applied("eq", low, high))
            places.append(_inside(low, size))
        if searched >= 0:
            places.append(_inside(ends[searched][1], sizes[searched]))
        use = TableUse(int(node.value or 0), searched)
        number = self.tables.setdefault(use, len(self.tables))
        if searched >= 0:
            sure.append(Expr("table_sorted", "bool", (), number))
        least = Expr("table_min", "int64", tuple(places), number)
        most = least if searched < 0 else Expr("table_max", "int64", tuple(places), number)
        return least, most, both(*sure)


def _variable(name: str) -> Whole:
    ends = {"q_idx": ("q_lo", "q_hi"), "kv_idx": ("kv_lo", "kv_hi")}.get(name, (name, name))
    low, high = (Expr("var", "int64", (), end) for end in ends)
    return Whole(low, high, (0, CORNERS[ends[1]]))


def _ends(index: Whole, size: Expr) -> tuple[Expr, Expr]:
    """The ends of an index; a number below 0 counts from the tensor's end."""
    low, high = index.low, index.high
    if index.number is not None and index.number < 0:
        low = high = applied("add", size, low)
    return low, high


def _limited(low: Expr, high: Expr, dtype: str, sure: Expr) -> Whole:
    """A number from outside: beyond what sums can hold it is not known."""
    least, most = dtype_range(dtype)
    if dtype in ("int64", "uint64"):
        sure = both(
            sure,
            applied("le", integer(-_REMEMBERED), low),
            applied("le", high, integer(_REMEMBERED)),
        )
        least, most = -_REMEMBERED, _REMEMBERED
        point = low is high
        low = clamped(low, least, most)
        high = low if point else clamped(high, least, most)
    return Whole(low, high, (least, most), sure)


def _inside(position: Expr, size: Expr) -> Expr:
    """A place that exists, whatever the index says: a wrong one is not sure anyway."""
    last = applied("add", size, integer(-1))
    return applied("maximum", applied("minimum", position, last), integer(0))


@dataclass(frozen=True, slots=True)
class SearchTable:
    """A captured tensor, contiguous, with the searched dimension last.

    ordered: it never falls along that dimension, or never rises.
    """

    values: Tensor
    ordered: bool


def tables_of(uses: Sequence[TableUse], tensors: Sequence[Tensor]) -> tuple[SearchTable, ...]:
    """The tables that a mod's bounds read.

    Asks the device once whether the tensors that are searched are sorted, unless a CUDA graph is
    being captured: then none counts as sorted.
    """
    moved = [_arranged(tensors[use.slot], use.dim) for use in uses]
    searched = [i for i, use in enumerate(uses) if use.dim >= 0]
    ordered = dict(zip(searched, _sorted([moved[i] for i in searched]), strict=True))
    return tuple(SearchTable(values, ordered.get(i, True)) for i, values in enumerate(moved))


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


def verdicts(
    bounds: Bounds,
    corners: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float | bool],
    tables: Sequence[SearchTable],
) -> tuple[Tensor, Tensor]:
    """Two bools for each tile: every element is kept, and some element may be.

    corners: int64 tensors named as CORNERS, which broadcast against one
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
        elif node.op == "table_sorted":
            found[node] = torch.tensor(tables[int(node.value or 0)].ordered, device=device)
        elif node.op in ("table_min", "table_max"):
            number = int(node.value or 0)
            searched = bounds.tables[number].dim
            read = _read(tables[number], args, searched, node.op == "table_max")
            found[node] = read.to(torch.int64)
        else:
            found[node] = computed(node, args, device)
    return found[bounds.must], found[bounds.may]


def _read(table: SearchTable, places: list[Tensor], searched: int, greatest: bool) -> Tensor:
    """An entry, or of a sorted table the least or the greatest one over a range."""
    if searched < 0:
        return _at(table.values, places)
    *places, last = places
    first = places.pop(searched)
    ends = [_at(table.values, [*places, at]).to(torch.int64) for at in (first, last)]
    return torch.maximum(*ends) if greatest else torch.minimum(*ends)


def _at(values: Tensor, places: list[Tensor]) -> Tensor:
    if not places:
        return values
    found: Tensor = torch.ops.aten.index.Tensor(values, torch.broadcast_tensors(*places))
    return found
