"""What a score_mod reads along diagonals of a tile of Gluon's: once for each diagonal of a warp.

A relative bias is read at q_idx - kv_idx and a constant: all scores of a diagonal of a tile read
one place. The template's `broadcast_diagonals` gives each score what a lane of its warp has read,
and its `reduce_diagonals` the other way around adds up what goes to one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexattn.kernels.base.dialect import TensorForm
from flexattn.kernels.printers.argument_names import buffer_names
from flexattn.kernels.printers.triton_printer import MultiPrinter, View
from flexattn.mods.analysis.affine import FREE, Variables, along_diagonals, slope_of
from flexattn.mods.expr import Expr, reads

# A lane gives another one 32 bits.
_SHUFFLED = frozenset(("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8"))
# Of which diagonals a thread's names speak: those that it reads, and those that it has sums of.
_READ, SUMS = "diagonal", "summed"


def on_diagonals(load: Expr) -> bool:
    """Whether all scores of a diagonal of a tile read one place."""
    return reads(load, "kv_idx") and all(map(along_diagonals, load.args))


def reads_by_diagonal(load: Expr) -> bool:
    """Whether a load is printed once for each diagonal of a warp."""
    return load.op == "load" and load.dtype in _SHUFFLED and on_diagonals(load)


@dataclass(frozen=True, slots=True)
class Along:
    """Where a load reads along diagonals.

    checked: statements that make its indices. places: these, each with whether it is inside.
    value: what reads there. within: the name of whether a tile's places are all inside, "" where
    that is not asked. first, last: there, statements, and the last index: of a thread's first
    diagonal, and a number that is known when the kernel is compiled, so that all have one address.
    """

    checked: tuple[str, ...]
    places: list[Any]
    value: Any
    within: str = ""
    first: tuple[str, ...] = ()
    last: str = ""

    def place(self, base: str, steps: Sequence[str]) -> str:
        """The address where the tile is within; steps: of all indices but the last, whose is 1."""
        indices = (index.text for index, _ in self.places[:-1])
        rows = [f"{index} * {step}" for index, step in zip(indices, steps, strict=True)]
        return " + ".join([base, *rows, self.last])

    def branches(self, inside: str, checked: Iterable[str]) -> list[str]:
        """A statement for tiles that are within, and those for others, behind their indices."""
        others = [*self.checked, *checked]
        if not self.within:
            return others
        parts = {f"if {self.within}:": (*self.first, inside), "else:": others}
        return [line for at, under in parts.items() for line in (at, *(f"    {x}" for x in under))]


class DiagonalPrinter(MultiPrinter):
    """Prints a mod of a tile whose template has names for diagonals.

    diagonal_q: the rows of those of the tile's first key that a thread reads; diagonal_first and
    diagonal_offset: of the first one of these, and how much further each is; is_diagonal: whether
    it is one. summed_q and so on: of those that it has sums of.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.within: dict[Expr, str] = {}

    def along(self, load: Expr, prefix: str, lanes: str = _READ) -> Along:
        """Where a load reads; what does not change over a tile goes before the loop."""
        printer, places = self._at(load, prefix, f"{lanes}_q", f"is_{lanes}")
        found = Along(places, printer.places[load], printer.values[load])
        if load not in self.within:
            self.within[load] = self._within(load, f"{prefix}_within", found)
        if not self.within[load]:
            return found
        last, slope = load.args[-1], _slope(load)
        first, lines = self._at(last, f"{prefix}_first", f"{lanes}_first", f"is_{lanes}")
        step = "" if slope == 1 else f"{slope} * "
        index = f"{first.values[last].text} + {step}{lanes}_offset"
        return replace(found, within=self.within[load], first=lines, last=index)

    def _at(
        self, root: Expr, prefix: str, q_idx: str, kept: str
    ) -> tuple[_AlongPrinter, tuple[str, ...]]:
        view = View(prefix, q_idx, "start_n", by_row=False)
        dialect = replace(self.dialect, key=TensorForm("[BLOCK_N, BLOCK_M // 2]", "DIAGONALS"))
        traits = replace(self.traits, dialect=dialect)
        printer = _AlongPrinter(kept, self.mod, self.contiguous, traits, view, (root,))
        printed = printer.run()
        self.hoisted += printed.hoisted
        return printer, (*printed.early, *printed.body)

    def _within(self, load: Expr, name: str, found: Along) -> str:
        """Let the corners of a tile say whether all of its last index is inside.

        "" where the last index does not rise evenly, another one changes too, or it has a stride.
        """
        slot, last, slope = int(load.value or 0), load.args[-1], _slope(load)
        if not (slope and self.contiguous[slot]):
            return ""
        if any(not Variables()(arg) <= FREE for arg in load.args[:-1]):
            return ""
        # A thread's first diagonal may lie one before its warp's part of a tile.
        ends = [("start_m", "(start_n + BLOCK_N)"), ("(start_m + BLOCK_M - 1)", "start_n")]
        texts = []
        for number, (q_idx, kv_idx) in enumerate(ends if slope > 0 else ends[::-1]):
            view = View(f"{name}{number}", q_idx, kv_idx, by_row=False, by_key=False)
            corner = MultiPrinter(self.mod, self.contiguous, self.traits, view, (last,))
            self.early += corner.run().hoisted
            texts.append(corner.values[last].text)
        size = buffer_names(self.mod.kind, slot, len(load.args))[1][-1]
        rows = [inside for _, inside in found.places[:-1]]
        checks = [f"({texts[0]} >= 0)", f"({texts[1]} < {size})", *rows]
        self.early.append(f"{name} = {' & '.join(checks)}")
        return name

    def _load(self, node: Expr) -> Any:
        if not reads_by_diagonal(node):
            return super()._load(node)
        base, _, strides = buffer_names(self.mod.kind, int(node.value or 0), len(node.args))
        prefix = f"{base}_along{self.count}"
        along, read = self.along(node, prefix), f"{prefix}_read"
        self.places[node] = along.places
        inside = f"{read} = read_where({along.place(base, strides[:-1])}, is_{_READ})"
        self.early += along.branches(inside, [f"{read} = {along.value.text}"])
        # What a lane has read is there before the product, and given to each score behind it: it
        # has a third of the registers.
        if not any(node in other.args for other in self.ahead):
            self.ahead = self.ahead - {node}
        text = f"broadcast_diagonals({read}, {base})"
        return self._name(replace(along.value, text=text, row=True, key=True))


class _AlongPrinter(MultiPrinter):
    """Prints one load at a warp's diagonals, or an index of it; kept: which of these there are."""

    def __init__(self, kept: str, *given: Any) -> None:
        super().__init__(*given)
        self.kept = kept

    def _places(self, node: Expr) -> Any:
        places = super()._places(node)
        number = next((n for n, (index, _) in enumerate(places) if index.key), None)
        if number is not None:
            index, inside = places[number]
            places[number] = index, self.logical("and", [self.kept, inside])
        return places

    def _read(self, dtype: str, address: str, inside: str, key: bool) -> str:
        """What is given to other lanes is read as bits."""
        if self.node is self.roots[0]:
            return f"read_where({address}, {inside})"
        return super()._read(dtype, address, inside, key)

    def _guarded(self, load: Any) -> Any:
        """Gluon has no software pipeline that loads must be kept out of."""
        return load if self.node is self.roots[0] else self._name(load)


def _slope(load: Expr) -> int:
    """What the last index rises by from diagonal to diagonal; 0 where that is not the same."""
    found = slope_of(load.args[-1], "q_idx", Variables())
    return int(found.value or 0) if found is not None and found.op == "const" else 0
