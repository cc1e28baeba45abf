"""Linear forms: an integer as a sum of independent unknowns, each with its range over a tile.

Two terms of one unknown cancel before a range is taken, so q - kv, or (q + 3) - q, is as exact
over a tile as q alone: the difference of two ranges is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

from flexattn.mods.expr import Expr, const
from flexattn.mods.simplify import applied

# Sums of numbers below this do not wrap in 64 bits.
LARGEST = 2**61
# A sum of more unknowns becomes one: of a recurrence each step may add another.
_TERMS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """An unknown: its least and its greatest value over a tile, int64 expressions of the tile.

    least, most: numbers it never leaves on any tile.
    """

    low: Expr
    high: Expr
    least: int
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A sum of atoms times whole numbers, and a number."""

    terms: dict[Atom, int]
    offset: int

    def plus(self, other: Form, times: int = 1) -> Form:
        """self + times * other."""
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + times * factor
        kept = {atom: factor for atom, factor in terms.items() if factor}
        form = Form(kept, self.offset + times * other.offset)
        return form if len(kept) <= _TERMS else single(form.low, form.high, *form.range)

    def times(self, factor: int) -> Form:
        """factor * self."""
        return Form({}, 0).plus(self, factor)

    @property
    def range(self) -> tuple[int, int]:
        """The numbers that it never leaves on any tile."""
        ends = [
            sorted((factor * atom.least, factor * atom.most))
            for atom, factor in self.terms.items()
        ]
        return self.offset + sum(low for low, _ in ends), self.offset + sum(top for _, top in ends)

    @property
    def low(self) -> Expr:
        """Its least value over a tile; reached if the atoms do not depend on one another."""
        return self._end(lowest=True)

    @property
    def high(self) -> Expr:
        """Its greatest value over a tile."""
        return self._end(lowest=False)

    def _end(self, lowest: bool) -> Expr:
        total: Expr | None = None
        for atom, factor in self.terms.items():
            end = atom.low if (factor > 0) == lowest else atom.high
            if abs(factor) != 1:
                end = applied("mul", end, integer(abs(factor)))
            if total is None:
                total = end if factor > 0 else applied("neg", end)
            else:
                total = applied("add" if factor > 0 else "sub", total, end)
        if total is None:
            return integer(self.offset)
        return applied("add", total, integer(self.offset))


def constant(value: int) -> Form:
    """A form without unknowns."""
    return Form({}, value)


def single(low: Expr, high: Expr, least: int, most: int) -> Form:
    """A form of one new unknown."""
    if low is high and low.op == "const":
        return constant(int(low.value or 0))
    return Form({Atom(low, high, least, most): 1}, 0)


def integer(value: int) -> Expr:
    """A number in a bound's arithmetic."""
    return const(value, "int64")


def truth(value: bool) -> Expr:
    """A verdict that is known."""
    return const(value, "bool")


def both(*terms: Expr) -> Expr:
    """The conjunction of conditions."""
    return reduce(partial(applied, "and"), terms, truth(True))
