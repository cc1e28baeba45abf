"""Print a score_mod with its derivatives, and what adds them to the gradients of what it loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flexattn.kernels.base.dialect import Dialect, TensorForm
from flexattn.kernels.printers.argument_names import buffer_names
from flexattn.kernels.printers.diagonals import SUMS, Along, DiagonalPrinter, on_diagonals
from flexattn.kernels.printers.triton_printer import (
    TILE,
    MultiPrinter,
    Printed,
    Traits,
    View,
    print_mod,
)
from flexattn.mods.derivative import Derivatives, LoadDerivative, derivatives
from flexattn.mods.expr import Expr
from flexattn.problem import Captures, Structure

# The two halves of a backward: one holds query rows and walks the keys, the other holds keys and
# walks the rows. What is held lies along a tile's first axis.
OVER_KEYS = Dialect(
    tile=TensorForm("[BLOCK_M2, BLOCK_N2]"),
    key=TensorForm("[1, BLOCK_N2]"),
    row=TensorForm("[BLOCK_M2]"),
)
OVER_ROWS = Dialect(
    tile=TensorForm("[BLOCK_N1, BLOCK_M1]"),
    key=TensorForm("[1, BLOCK_M1]"),
    row=TensorForm("[BLOCK_N1]"),
    walked="q_idx",
    within="start_m < q_len",
)


@dataclass(frozen=True, slots=True)
class Scatter:
    """What adds the gradient of one load to a captured tensor's: statements.

    before, inside, after: the loop over keys, in which `ds` is the gradient of the tile's modified
    scores, and `p` their weights. In a tile of Gluon's, after: the products that ds goes into.
    """

    before: tuple[str, ...]
    inside: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrintedGradient:
    """Statements that turn `score`, the scaled product, into the modified score and derivatives.

    hoisted, early, body: as of Printed. result: the modified score. factor: what the gradient of
    it is multiplied by to be that of `score`; "" for 1, "0" where the score is not read.
    """

    hoisted: tuple[str, ...]
    early: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    factor: str
    scatters: tuple[Scatter, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Every statement."""
        scattered = (
            line for each in self.scatters for line in (*each.before, *each.inside, *each.after)
        )
        own = (*self.hoisted, *self.early, *self.body, self.result, self.factor)
        return (*own, *scattered)


def grad_name(slot: int) -> str:
    """The kernel's argument for a captured tensor's gradient: float32, dense."""
    return f"{buffer_names('score', slot, 0)[0]}_grad"


def adds_along_diagonals(structure: Structure) -> bool:
    """Whether a load that gets a gradient has one place for all of a diagonal of a tile."""
    if structure.score is None or not structure.grads:
        return False
    found = derivatives(structure.score.mod, structure.grads)
    return any(on_diagonals(each.load) for each in found.loads)


def print_gradient(
    captures: Captures, slots: tuple[int, ...], traits: Traits, diagonals: bool = True
) -> PrintedGradient:
    """A score_mod of one half, whose dialect the traits have, with its derivatives.

    slots: the captured tensors whose gradients this half adds up, which is one that holds rows.
    diagonals: of a tile's diagonals, where these have one place each, the sums are added.
    Raises UnsupportedError as `derivatives` and `print_mod` do.
    """
    found = derivatives(captures.mod, slots)
    roots = (captures.mod.expr, *found.roots)
    kind = DiagonalPrinter if traits.dialect.gluon else MultiPrinter
    printer = kind(captures.mod, captures.contiguous, traits, TILE, roots)
    printed = printer.run()
    result = _as_tile(printer, captures.mod.expr, printed.result)
    factor = "0" if found.score is None else _factor(printer, found.score)
    scatters = tuple(
        _Scatter(printer, i, each, diagonals).run(found) for i, each in enumerate(found.loads)
    )
    steps = [line for slot in sorted({int(each.load.value or 0) for each in found.loads})
             for line in _steps(slot, captures.mod.buffers[slot].rank)]  # fmt: skip
    hoisted = (*printer.hoisted, *steps)
    return PrintedGradient(hoisted, printed.early, printed.body, result, factor, scatters)


def print_with_gradients(
    structure: Structure, traits: Traits, slots: tuple[int, ...] = (), diagonals: bool = False
) -> tuple[PrintedGradient | None, Printed | None]:
    """The score_mod with its derivatives and the mask_mod of a half; None where there is none.

    slots, diagonals, and what is raised: as of `print_gradient`.
    """
    score = mask = None
    if structure.score is not None:
        score = print_gradient(structure.score, slots, traits, diagonals)
    if structure.mask is not None:
        mask = print_mod(structure.mask.mod, structure.mask.contiguous, traits)
    return score, mask


def _as_tile(printer: MultiPrinter, expr: Expr, text: str) -> str:
    """A score that does not read the product is the same for some scores, or for all."""
    value = printer.values[expr]
    if value.row and value.key:
        return text
    return f"{printer.dialect.zeros(printer.dialect.tile, 'float32')} + {text}"


def _factor(printer: MultiPrinter, expr: Expr) -> str:
    if expr.op == "const" and expr.value == 1.0:
        return ""
    value = printer.values[expr]
    return value.text if value.dtype == "float32" else f"{value.text}.to({printer.tl}.float32)"


def _steps(slot: int, rank: int) -> list[str]:
    """Strides of a dense gradient, in 64 bits where it may be large; none for the last."""
    base, sizes, _ = buffer_names("score", slot, rank)
    lines = []
    for dim in reversed(range(rank - 1)):
        inner = "" if dim == rank - 2 else f" * {base}_step{dim + 1}"
        lines.append(f"{base}_step{dim} = {sizes[dim + 1]}.to(tl.int64){inner}")
    return lines


class _PlacePrinter(MultiPrinter):
    """Prints where a load reads, and not the load."""

    def _load(self, node: Expr) -> Any:
        if node is not self.roots[0]:
            return super()._load(node)
        self._places(node)
        return self.values[node.args[0]]


def _along_diagonals(printer: MultiPrinter, load: Expr, prefix: str) -> _PlacePrinter:
    """Where a load reads on the diagonals of a tile: of its first row, and keys `diagonal_kv`."""
    view = View(prefix, q_idx="start_m", kv_idx="diagonal_kv", by_row=False)
    dialect = replace(printer.dialect, key=TensorForm("[BLOCK_N2]"))
    traits = replace(printer.traits, dialect=dialect)
    found = _PlacePrinter(printer.mod, printer.contiguous, traits, view, (load,))
    found.run()
    return found


class _Scatter:
    """One load's gradient, summed over what its place does not depend on, then added there.

    Where no index depends on the keys, that is once for all of the loop.
    """

    def __init__(
        self, printer: MultiPrinter, number: int, each: LoadDerivative, diagonals: bool
    ) -> None:
        self.slot = int(each.load.value or 0)
        self.base = buffer_names("score", self.slot, 0)[0]
        self.places = printer.places[each.load]
        self.row = any(index.row for index, _ in self.places)
        self.key = any(index.key for index, _ in self.places)
        self.factor = _factor(printer, each.factor)
        self.logical, self.tl = printer.logical, printer.tl
        self.number = number
        self.sum = f"{self.base}_sum{number}"
        self.along = None
        self.warps = None
        if isinstance(printer, DiagonalPrinter):
            self.warps = printer.along(each.load, f"{self.base}_added{number}", SUMS)
            self.places = self.warps.places
        if diagonals and self.warps is None and self.row and self.key and on_diagonals(each.load):
            self.along = _along_diagonals(printer, each.load, f"{self.base}_along{number}")

    def run(self, found: Derivatives) -> Scatter:
        """The statements; found: of all loads."""
        each = f"ds * {self.factor}" if self.factor else "ds"
        # A derivative may be no number where a weight is 0.
        each = f"{self.tl}.where(p == 0.0, 0.0, {each})" if self.factor else each
        if self.warps is not None:
            return self._over_warps(each, self.warps)
        if not found.summed((self.slot,)):
            own = ("rows[:, None]", "(offs_n < end_n)[None, :]")
            return Scatter((), (f"{self.sum} = {each}", *self._add(*own, by="store")), ())
        if self.along is not None:
            return self._over_diagonals(each, self.along)
        some = f"({self.sum} != 0.0)"
        if self.row and self.key:
            return Scatter((), (f"{self.sum} = {each}", *self._add(some, "rows[:, None]")), ())
        if self.key:
            kept = f"tl.where(rows[:, None], {each}, 0.0)"
            grad = f"{self.sum} = tl.sum({kept}, 0)[None, :]"
            return Scatter((), (grad, *self._add(some)), ())
        before = f"{self.sum} = tl.zeros([BLOCK_M2, 1], tl.float32)"
        inside = f"{self.sum} += tl.sum({each}, 1)[:, None]"
        if self.row:
            return Scatter((before,), (inside,), self._add("rows[:, None]"))
        total = f"{self.sum} = tl.sum(tl.where(rows[:, None], {self.sum}, 0.0))"
        return Scatter((before,), (inside,), (total, *self._add()))

    def _over_diagonals(self, each: str, along: _PlacePrinter) -> Scatter:
        """One addition for each diagonal of a tile, in place of one for each of its scores.

        Row i moved by i columns has element (i, j) in column c = (j - i) mod N: a column then
        holds the diagonals i - j = N t - c, for as many t as rows of M pass over N columns.
        """
        self.places = along.places[along.roots[0]]
        moved, turned = f"{self.base}_moved{self.number}", f"{self.base}_turned{self.number}"
        lines = [
            f"{moved} = lanes_n[None, :] + lanes_m[:, None]",
            f"{turned} = tl.where(rows[:, None], {each}, 0.0)",
            f"{turned} = tl.gather({turned}, {moved} % BLOCK_N2, 1)",
            "for turn in tl.static_range(0, (BLOCK_M2 + BLOCK_N2 - 2) // BLOCK_N2 + 1):",
        ]
        inner = [
            f"{self.sum} = tl.sum(tl.where({moved} // BLOCK_N2 == turn, {turned}, 0.0), 0)",
            "diagonal_kv = start_n + lanes_n - turn * BLOCK_N2",
            *along.hoisted, *along.early, *along.body,
            *self._add(f"({self.sum} != 0.0)"),
        ]  # fmt: skip
        return Scatter((), (*lines, *(f"    {line}" for line in inner)), ())

    def _over_warps(self, each: str, along: Along) -> Scatter:
        """One addition for each diagonal of a warp's part of a tile."""
        values = f"{self.base}_ds{self.number}"
        steps = [f"{self.base}_step{dim}" for dim in range(len(self.places) - 1)]
        place = along.place(f"{self.base}_grad", steps)
        inside = f"add_where({place}, {self.sum}, is_{SUMS})"
        added = along.branches(inside, self._add(f"({self.sum} != 0.0)", by="add_where"))
        lines = (f"{self.sum} = reduce_diagonals({values})", *added)
        return Scatter((), (f"{values} = {each}",), lines)

    def _add(self, *kept: str, by: str = "atomic_add") -> tuple[str, ...]:
        """Statements that add the sum to the gradient where it is kept and inside."""
        last = len(self.places) - 1
        steps = [
            index.text if dim == last else f"{index.text} * {self.base}_step{dim}"
            for dim, (index, _) in enumerate(self.places)
        ]
        place, inside = (f"{self.base}_{what}{self.number}" for what in ("place", "inside"))
        checks = [*(inside for _, inside in self.places), *kept]
        lines = [f"{place} = {' + '.join([f'{self.base}_grad', *steps])}"]
        if checks:
            lines.append(f"{inside} = {self.logical('and', checks)}")
        if by == "add_where":
            return (*lines, f"{by}({place}, {self.sum}, {inside})")
        mask = f", mask={inside}" if checks else ""
        relaxed = ', sem="relaxed"' if by == "atomic_add" else ""
        return (*lines, f"{self.tl}.{by}({place}, {self.sum}{mask}{relaxed})")
