"""Print a score_mod with its derivatives, and what adds them to the gradients of what it loads."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.kernels.base.dialect import Dialect, Tensor
from flexattn.kernels.printers.triton_printer import TILE, MultiPrinter, Traits, buffer_names
from flexattn.mods.derivative import LoadDerivative, derivatives
from flexattn.mods.expr import Expr
from flexattn.problem import Captures

__all__ = ["OVER_KEYS", "OVER_ROWS", "PrintedGradient", "Scatter", "grad_name", "print_gradient"]

# The two halves of a backward: one holds query rows and walks the keys, the other holds keys and
# walks the rows. What is held lies along a tile's first axis.
OVER_KEYS = Dialect(
    tile=Tensor("[BLOCK_M2, BLOCK_N2]"), key=Tensor("[1, BLOCK_N2]"), row=Tensor("[BLOCK_M2]")
)
OVER_ROWS = Dialect(
    tile=Tensor("[BLOCK_N1, BLOCK_M1]"),
    key=Tensor("[1, BLOCK_M1]"),
    row=Tensor("[BLOCK_N1]"),
    walked="q_idx",
    within="start_m < q_len",
)


@dataclass(frozen=True, slots=True)
class Scatter:
    """What adds the gradient of one load to a captured tensor's: statements.

    before, inside, after: the loop over keys, in which `ds` is the gradient of the tile's modified
    scores, and `p` their weights.
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


def print_gradient(captures: Captures, slots: tuple[int, ...], traits: Traits) -> PrintedGradient:
    """A score_mod of one half, whose dialect the traits have, with its derivatives.

    slots: the captured tensors whose gradients this half adds up, which is one that holds rows.
    Raises UnsupportedError as `derivatives` and `print_mod` do.
    """
    found = derivatives(captures.mod, slots)
    roots = (captures.mod.expr, *found.roots)
    printer = MultiPrinter(captures.mod, captures.contiguous, traits, TILE, roots)
    printed = printer.run()
    result = _as_tile(printer, captures.mod.expr, printed.result)
    factor = "0" if found.score is None else _factor(printer, found.score)
    scatters = tuple(_Scatter(printer, i, each).run() for i, each in enumerate(found.loads))
    steps = [line for slot in sorted({int(each.load.value or 0) for each in found.loads})
             for line in _steps(slot, captures.mod.buffers[slot].rank)]  # fmt: skip
    hoisted = (*printed.hoisted, *steps)
    return PrintedGradient(hoisted, printed.early, printed.body, result, factor, scatters)


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


class _Scatter:
    """One load's gradient, summed over what its place does not depend on, then added there.

    Where no index depends on the keys, that is once for all of the loop.
    """

    def __init__(self, printer: MultiPrinter, number: int, each: LoadDerivative) -> None:
        self.slot = int(each.load.value or 0)
        self.base = buffer_names("score", self.slot, 0)[0]
        self.indices, self.inside = printer.places[each.load]
        self.row = any(index.row for index in self.indices)
        self.key = any(index.key for index in self.indices)
        self.factor = _factor(printer, each.factor)
        self.logical = printer.logical
        self.sum = f"{self.base}_sum{number}"

    def run(self) -> Scatter:
        each = f"ds * {self.factor}" if self.factor else "ds"
        # A derivative may be no number where a weight is 0.
        each = f"tl.where(p == 0.0, 0.0, {each})" if self.factor else each
        if self.row and self.key:
            grad = f"{self.sum} = {each}"
            return Scatter((), (grad, self._add(f"({self.sum} != 0.0)", "rows[:, None]")), ())
        if self.key:
            kept = f"tl.where(rows[:, None], {each}, 0.0)"
            grad = f"{self.sum} = tl.sum({kept}, 0)[None, :]"
            return Scatter((), (grad, self._add(f"({self.sum} != 0.0)")), ())
        before = f"{self.sum} = tl.zeros([BLOCK_M2, 1], tl.float32)"
        inside = f"{self.sum} += tl.sum({each}, 1)[:, None]"
        if self.row:
            return Scatter((before,), (inside,), (self._add("rows[:, None]"),))
        total = f"{self.sum} = tl.sum(tl.where(rows[:, None], {self.sum}, 0.0))"
        return Scatter((before,), (inside,), (total, self._add()))

    def _add(self, *kept: str) -> str:
        places = [
            index.text if dim == len(self.indices) - 1 else f"{index.text} * {self.base}_step{dim}"
            for dim, index in enumerate(self.indices)
        ]
        address = " + ".join([f"{self.base}_grad", *places])
        checks = [*self.inside, *kept]
        mask = f", mask={self.logical('and', checks)}" if checks else ""
        return f'tl.atomic_add({address}, {self.sum}{mask}, sem="relaxed")'
