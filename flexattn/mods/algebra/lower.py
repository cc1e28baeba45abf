"""bounds_of(): a mask's expression turned into two others, which decide a whole tile at once.

The first says that every element of the tile is kept, the second that some element may be. They
are expressions of the tile's corners (`q_lo`, `q_hi`, `kv_lo`, `kv_hi`, inclusive), of `b`, `h`,
and of the least and the greatest value of captured tensors over ranges of indices. Range
arithmetic over linear forms (flexattn.mods.algebra.whole); sound, never exact by promise: no
element is kept where the second is false, and none is removed where the first is true.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.mods.algebra import real, whole
from flexattn.mods.algebra.real import Real
from flexattn.mods.algebra.whole import (
    TRUE,
    Flag,
    Whole,
    both,
    settled,
    single,
)
from flexattn.mods.analysis.intervals import dtype_range
from flexattn.mods.expr import Expr, Mod, const, integer, once, walk
from flexattn.mods.ops import is_float, is_int
from flexattn.mods.simplify import applied, clamped, make

# What a tile is told by; each with the numbers that it never leaves.
_LENGTH, _HEADS = 2**30, 2**20
CORNERS = {"b": _LENGTH, "h": _HEADS, **dict.fromkeys(("q_lo", "q_hi", "kv_lo", "kv_hi"), _LENGTH)}
# Numbers from memory and captured numbers beyond this decide nothing.
_REMEMBERED = 2**48
# Of these torch has no comparison to tell whether they are sorted.
_UNORDERED = ("uint16", "uint32", "uint64")


@dataclass(frozen=True, slots=True)
class TableUse:
    """A captured tensor whose extremes are asked for over a range of dimension `dim`.

    dim -1: it is read at single places alone.
    """

    slot: int
    dim: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Verdicts on a tile, as bool expressions of its corners.

    must: every element is kept. may: some element may be kept. `tables` are what the operations
    "table_min" and "table_max" read, by number: their operands are a position for each dimension,
    and the end of the range for the dimension that is searched.
    """

    must: Expr
    may: Expr
    tables: tuple[TableUse, ...]


@once
def bounds_of(mod: Mod) -> Bounds:
    """The verdicts of a mask_mod; worked out once for each mod."""
    return _Lowering().run(mod)


class _Lowering:
    def __init__(self) -> None:
        self.wholes: dict[Expr, Whole | None] = {}
        self.reals: dict[Expr, Real | None] = {}
        self.flags: dict[Expr, Flag] = {}
        self.tables: dict[TableUse, int] = {}

    def run(self, mod: Mod) -> Bounds:
        for node in walk(mod.expr):
            if node.dtype == "bool":
                self.flags[node] = self._flag(node)
            elif is_int(node.dtype) and node.dtype != "uint64":
                self.wholes[node] = self._whole(node)
            elif is_float(node.dtype):
                self.reals[node] = self._real(node)
        flag = self.flags[mod.expr]
        return Bounds(flag.must, flag.may, tuple(self.tables))

    def _flag(self, node: Expr) -> Flag:
        if node.op == "const":
            return whole.known(const(bool(node.value), "bool"))
        if node.op == "scalar":
            return whole.known(node)
        if node.op == "load":
            return whole.nonzero(self._load(node))
        first = node.args[0]
        if first.dtype == "bool":
            return whole.combine(node.op, [self.flags[arg] for arg in node.args])
        if is_float(first.dtype):
            return real.compare(node.op, [self.reals.get(arg) for arg in node.args])
        operands = [self.wholes.get(arg) for arg in node.args]
        if node.op == "cast":
            return whole.nonzero(operands[0])
        return whole.compare(node.op, operands)

    def _whole(self, node: Expr) -> Whole | None:
        if node.op == "const":
            return Whole.of(int(node.value or 0))
        if node.op == "var":
            return _variable(str(node.value))
        if node.op == "scalar":
            number = make("cast", "int64", (node,))
            return _limited(number, number, node.dtype, TRUE)
        if node.op == "load":
            return self._load(node)
        if node.op == "where":
            x, y = (self.wholes.get(arg) for arg in node.args[1:])
            found = whole.choose(self.flags[node.args[0]], x, y)
        elif node.op == "cast" and node.args[0].dtype == "bool":
            found = whole.of_flag(self.flags[node.args[0]])
        elif node.op == "cast" and is_float(node.args[0].dtype):
            found = real.to_whole(self.reals.get(node.args[0]))
        else:
            found = whole.apply(node.op, [self.wholes.get(arg) for arg in node.args])
        return None if found is None else settled(found, node.dtype)

    def _real(self, node: Expr) -> Real | None:
        if node.op in ("const", "scalar"):
            value = make("cast", "float64", (node,))
            return real.exact(value, value, node.dtype)
        if node.op == "load":
            return self._float_load(node)
        if node.op == "where":
            x, y = (self.reals.get(arg) for arg in node.args[1:])
            return real.choose(self.flags[node.args[0]], x, y)
        source = node.args[0].dtype
        if node.op == "cast" and source == "bool":
            return real.of_flag(self.flags[node.args[0]])
        if node.op == "cast" and not is_float(source):
            return real.of_whole(self.wholes.get(node.args[0]), node.dtype)
        return real.apply(node.op, [self.reals.get(arg) for arg in node.args], node.dtype)

    def _load(self, node: Expr) -> Whole | None:
        """What a captured tensor of integers holds between the ends of an index."""
        found = None if node.dtype in _UNORDERED else self._extremes(node, "int64")
        return None if found is None else _limited(*found[:2], node.dtype, found[2])

    def _float_load(self, node: Expr) -> Real | None:
        """One entry of a captured tensor of floats: of a range of them nothing is known."""
        found = self._extremes(node, "float64")
        value = None if found is None else real.exact(*found[:2], node.dtype)
        if found is None or value is None or found[0] is not found[1]:
            return None
        return Real(value.low, value.high, both(value.sure, found[2]))

    def _extremes(self, node: Expr, dtype: str) -> tuple[Expr, Expr, Expr] | None:
        """The least and the greatest entry between the ends of an index, and whether it is sure.

        A range of one index is searched; more than one decide something where they are points.
        """
        indices = [self.wholes.get(arg) for arg in node.args]
        known = [index for index in indices if index is not None]
        if len(known) < len(indices):
            return None
        sizes = [Expr("size", "int64", (), f"{node.value}.{dim}") for dim in range(len(known))]
        ends = [_ends(index, size) for index, size in zip(known, sizes, strict=True)]
        # NaN is neither the least nor the greatest: floats are never searched.
        wide = [dim for dim, (low, high) in enumerate(ends) if low is not high]
        searched = wide[0] if len(wide) == 1 and dtype == "int64" else -1
        sure = [index.sure for index in known]
        places: list[Expr] = []
        for dim, ((low, high), size) in enumerate(zip(ends, sizes, strict=True)):
            sure.append(applied("lt", high, size))
            if known[dim].form.range[0] < 0:
                sure.append(applied("le", integer(0), low))
            if dim in wide and dim != searched:
                sure.append(applied("eq", low, high))
            places.append(_inside(low, size))
        if searched >= 0:
            places.append(_inside(ends[searched][1], sizes[searched]))
        use = TableUse(int(node.value or 0), searched)
        number = self.tables.setdefault(use, len(self.tables))
        least = Expr("table_min", dtype, tuple(places), number)
        most = least if searched < 0 else Expr("table_max", dtype, tuple(places), number)
        return least, most, both(*sure)


def _variable(name: str) -> Whole:
    ends = {"q_idx": ("q_lo", "q_hi"), "kv_idx": ("kv_lo", "kv_hi")}.get(name, (name, name))
    low, high = (Expr("var", "int64", (), end) for end in ends)
    return Whole(single(low, high, 0, CORNERS[ends[1]]))


def _ends(index: Whole, size: Expr) -> tuple[Expr, Expr]:
    """The ends of an index; a number below 0 counts from the tensor's end."""
    low, high = index.form.low, index.form.high
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
    return Whole(single(low, high, least, most), sure)


def _inside(position: Expr, size: Expr) -> Expr:
    """A place that exists, whatever the index says: a wrong one is not sure anyway."""
    last = applied("add", size, integer(-1))
    return applied("maximum", applied("minimum", position, last), integer(0))
