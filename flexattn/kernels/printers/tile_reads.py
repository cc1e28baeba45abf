"""Reads of a tile whose places rise evenly, without a comparison for each score.

A relative bias is read at q_idx - kv_idx and a constant. Each such read wraps a negative place and
compares it with the tensor's size, which takes more instructions than the product of the scores.
Where the first and the last place of a tile are inside, all are.
"""

from __future__ import annotations

from typing import Any

from flexattn.kernels.printers.triton_printer import MultiPrinter, View, buffer_names
from flexattn.mods.analysis.dependence import Variables, slope_of
from flexattn.mods.expr import Expr


class TilePrinter(MultiPrinter):
    """Prints a mod of a backward's half; reads that rise evenly stand behind one condition."""

    def _load(self, node: Expr) -> Any:
        """As of any printer, in a branch where all of the tile is not inside."""
        value = super()._load(node)
        if not (value.row and value.key):
            return value
        name = value.text
        lines = self.early if node in self.ahead else self.body
        slopes = [each for each in map(self._slopes, node.args) if each is not None]
        if len(slopes) < len(node.args):
            return value
        evenly = [arg for arg, each in zip(node.args, slopes, strict=True) if each != (0, 0)]
        corner = _Corner(self, name, evenly)
        lines[-1:] = [*corner.lines, *self._either(node, name, lines[-1], slopes, corner)]
        return value

    def _slopes(self, index: Expr) -> tuple[int, int] | None:
        """How much an index rises with each position that a tile holds, and that it walks."""
        reads = Variables()
        held = "q_idx" if self.dialect.walked == "kv_idx" else "kv_idx"
        found = [slope_of(index, each, reads) for each in (held, self.dialect.walked)]
        if "score" in reads(index) or any(x is None or x.op != "const" for x in found):
            return None
        one, other = (int(x.value or 0) for x in found if x is not None)
        return one, other

    def _either(
        self,
        node: Expr,
        name: str,
        read: str,
        slopes: list[tuple[int, int]],
        corner: _Corner,
    ) -> list[str]:
        """The read without comparisons where all of the tile is inside, else as it stands."""
        slot = int(node.value or 0)
        rank = self.mod.buffers[slot].rank
        base, sizes, strides = buffer_names(self.mod.kind, slot, rank)
        held, walked = self.dialect.tile.shape.strip("[]").split(", ")
        address, checks = [base], []
        for dim, (arg, (one, other)) in enumerate(zip(node.args, slopes, strict=True)):
            unit = dim == rank - 1 and self.contiguous[slot]
            step = "" if unit else f" * {strides[dim]}"
            index, inside = self.places[node][dim]
            if (one, other) == (0, 0):
                address.append(f"{index.text}{step}")
                checks.append(inside)
                continue
            first = corner.first(arg)
            low = " + ".join([first, *_reach(one, held, -1), *_reach(other, walked, -1)])
            high = " + ".join([first, *_reach(one, held, 1), *_reach(other, walked, 1)])
            checks += [f"({low} >= 0)", f"({high} < {sizes[dim]})"]
            address.append(f"{first}{step}")
            places = f"({_steps(one, held, '[:, None]')} + {_steps(other, walked, '[None, :]')})"
            address.append(f"{places}{step}")
        return [
            f"if {self.logical('and', checks)}:",
            f"    {name} = {self.tl}.load({' + '.join(address)})",
            "else:",
            f"    {read}",
        ]


class _Corner:
    """Indices at a tile's first row and key, and the statements that compute them."""

    def __init__(self, printer: TilePrinter, name: str, indices: list[Expr]) -> None:
        view = View(f"{name}_first", q_idx="start_m", kv_idx="start_n", by_row=False, by_key=False)
        self._printer = MultiPrinter(
            printer.mod, printer.contiguous, printer.traits, view, tuple(indices)
        )
        self.lines = self._printer.run().lines[:-1] if indices else ()

    def first(self, index: Expr) -> str:
        return f"{self._printer.values[index].text}.to(tl.int64)"


def _reach(slope: int, size: str, sign: int) -> list[str]:
    """How far beyond the first place a tile reaches, in one direction."""
    return [f"{slope} * ({size} - 1)"] if slope * sign > 0 else []


def _steps(slope: int, size: str, shape: str) -> str:
    lanes = "lanes_m" if size.startswith("BLOCK_M") else "lanes_n"
    return f"{slope} * {lanes}.to(tl.int64){shape}"
