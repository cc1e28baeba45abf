"""What a score_mod reads along diagonals of a tile of Gluon's: once for each diagonal of a warp.

A relative bias is read at q_idx - kv_idx and a constant: all scores of a diagonal of a tile read
one place. The template's `broadcast_diagonals` gives each score what a lane of its warp has read,
and its `reduce_diagonals` the other way around adds up what goes to one place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexattn.kernels.base.dialect import TensorForm
from flexattn.kernels.printers.triton_printer import MultiPrinter, View, buffer_names
from flexattn.mods.analysis.dependence import along_diagonals
from flexattn.mods.expr import Expr, reads

# A lane gives another one 32 bits.
_SHUFFLED = frozenset(("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8"))


def on_diagonals(load: Expr) -> bool:
    """Whether all scores of a diagonal of a tile read one place."""
    return reads(load, "kv_idx") and all(map(along_diagonals, load.args))


def reads_by_diagonal(load: Expr) -> bool:
    """Whether a load is printed once for each diagonal of a warp."""
    return load.op == "load" and load.dtype in _SHUFFLED and on_diagonals(load)


class DiagonalPrinter(MultiPrinter):
    """Prints a mod of a tile whose template has names for a warp's diagonals.

    diagonal_q: the rows of those of the tile's first key, and is_diagonal whether it is one.
    """

    def _load(self, node: Expr) -> Any:
        if not reads_by_diagonal(node):
            return super()._load(node)
        base = buffer_names(self.mod.kind, int(node.value or 0), 0)[0]
        view = View(f"{base}_along{self.count}", "diagonal_q", "start_n", by_row=False)
        dialect = replace(self.dialect, key=TensorForm("[BLOCK_N, BLOCK_M // 2]", "DIAGONALS"))
        traits = replace(self.traits, dialect=dialect)
        along = _AlongPrinter(self.mod, self.contiguous, traits, view, (node,))
        printed = along.run()
        self.hoisted += printed.hoisted
        self.early += [*printed.early, *printed.body]
        self.places[node] = along.places[node]
        # What a lane has read is there before the product, and given to each score behind it: it
        # has a third of the registers.
        if not any(node in other.args for other in self.ahead):
            self.ahead = self.ahead - {node}
        read = along.values[node]
        return self._name(
            replace(read, text=f"broadcast_diagonals({read.text})", row=True, key=True)
        )


class _AlongPrinter(MultiPrinter):
    """Prints one load at a warp's diagonals."""

    def _places(self, node: Expr) -> Any:
        places = super()._places(node)
        number = next((n for n, (index, _) in enumerate(places) if index.key), None)
        if number is not None:
            index, inside = places[number]
            places[number] = index, self.logical("and", ["is_diagonal", inside])
        return places

    def _guarded(self, load: Any) -> Any:
        """Gluon has no software pipeline that loads must be kept out of."""
        return self._name(load)
