"""Integers and conditions over a tile: what each operation does to a linear form or its two ends.

An operation without a rule leaves its result unknown, and so is every float: the elements of
blocks that rest on such a result are evaluated.

A form is a sum of independent unknowns, each with its range over a tile. Two terms of one unknown
cancel before a range is taken, so q - kv, or (q + 3) - q, is as exact over a tile as q alone: the
difference of two ranges is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from flexattn.mods.analysis.affine import Sum
from flexattn.mods.analysis.intervals import dtype_range
from flexattn.mods.expr import Expr, const, integer
from flexattn.mods.ops import OPS, Range
from flexattn.mods.simplify import applied, make

# Sums of numbers below this do not wrap in 64 bits.
LARGEST = 2**61
# A sum of more unknowns becomes one: of a recurrence each step may add another.
_TERMS = 16
# Verdicts that are known.
TRUE, FALSE = const(True, "bool"), const(False, "bool")


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
class Form(Sum[Atom]):
    """A sum of atoms."""

    def plus(self, other: Form, times: int = 1) -> Form:
        """self + times * other; a sum of many atoms is one."""
        form = Sum.plus(self, other, times)
        return form if len(form.terms) <= _TERMS else single(form.low, form.high, *form.range)

    @property
    def range(self) -> tuple[int, int]:
        """The numbers that it never leaves on any tile."""
        ends = [
            sorted((factor * atom.least, factor * atom.most))
            for atom, factor in self.terms.items()
        ]
        return self.number + sum(low for low, _ in ends), self.number + sum(top for _, top in ends)

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
            return integer(self.number)
        return applied("add", total, integer(self.number))


def constant(value: int) -> Form:
    """A form without unknowns."""
    return Form({}, value)


def single(low: Expr, high: Expr, least: int, most: int) -> Form:
    """A form of one new unknown."""
    if low is high and low.op == "const":
        return constant(int(low.value or 0))
    return Form({Atom(low, high, least, most): 1}, 0)


def both(*terms: Expr) -> Expr:
    """The conjunction of conditions."""
    return reduce(partial(applied, "and"), terms, TRUE)


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer of the mod as a form, which holds where `sure` does: else it may be anything.

    Not sure: it was read outside a captured tensor, or may have wrapped in its dtype.
    """

    form: Form
    sure: Expr = TRUE

    @property
    def low(self) -> Expr:
        """Its least value over a tile."""
        return self.form.low

    @property
    def high(self) -> Expr:
        """Its greatest value over a tile."""
        return self.form.high

    @classmethod
    def of(cls, value: int) -> Whole:
        """A number."""
        return cls(constant(value))

    @property
    def number(self) -> int | None:
        """Its value where it is a number."""
        return None if self.form.terms else self.form.number


def settled(x: Whole, dtype: str) -> Whole | None:
    """The result of an operation in its dtype; None where its ends do not fit 64 bits."""
    least, most = x.form.range
    if least < -LARGEST or most > LARGEST:
        return None
    low, high = dtype_range(dtype)
    sure = x.sure
    if least < low:
        sure = both(sure, applied("le", integer(low), x.low))
    if most > high:
        sure = both(sure, applied("le", x.high, integer(high)))
    return Whole(x.form, sure)


def apply(op: str, operands: Sequence[Whole | None]) -> Whole | None:
    """The result of an operation before its dtype limits it; None: nothing is known."""
    rule, known = _RULES.get(op), [x for x in operands if x is not None]
    if rule is None or not known or len(known) < len(operands):
        return None
    found = rule(*known)
    return (
        None if found is None else replace(found, sure=both(found.sure, *(x.sure for x in known)))
    )


def of_flag(flag: Flag) -> Whole:
    """0 or 1."""
    low, high = (make("cast", "int64", (end,)) for end in (flag.must, flag.may))
    return Whole(single(low, high, 0, 1))


def choose(condition: Flag, x: Whole | None, y: Whole | None) -> Whole | None:
    """where(condition, x, y): both where the condition does not decide."""
    if x is None or y is None:
        return None

    def end(op: str, x: Expr, y: Expr) -> Expr:
        first = applied("where", condition.must, x, applied(op, x, y))
        return applied("where", condition.may, first, y)

    ends = end("minimum", x.low, y.low), end("maximum", x.high, y.high)
    return Whole(single(*ends, *_range("where", x, y)), both(x.sure, y.sure))


_Rule = Callable[..., Whole | None]


def _range(op: str, *operands: Whole) -> Range:
    """The numbers that an operation never leaves on any tile."""
    rule = OPS[op].interval
    found = rule(*(x.form.range for x in operands)) if rule else None
    assert found is not None
    return found


def _mul(x: Whole, y: Whole) -> Whole | None:
    for one, other in ((x, y), (y, x)):
        if other.number is not None:
            return Whole(one.form.times(other.number))
    return None


def _abs(x: Whole) -> Whole:
    least, most = x.form.range
    if least >= 0:
        return x
    sizes = [applied("abs", end) for end in (x.low, x.high)]
    around = both(applied("le", x.low, integer(0)), applied("le", integer(0), x.high))
    low = applied("where", around, integer(0), applied("minimum", *sizes))
    return Whole(single(low, applied("maximum", *sizes), 0, max(abs(least), abs(most))))


def _rising(op: str) -> Callable[[Whole, Whole], Whole]:
    """The rule of an operation that never falls in any operand."""

    def rule(*operands: Whole) -> Whole:
        low, high = (
            applied(op, *(x.low for x in operands)),
            applied(op, *(x.high for x in operands)),
        )
        return Whole(single(low, high, *_range(op, *operands)))

    return rule


def _floor_div(x: Whole, y: Whole) -> Whole | None:
    if y.number == 1:
        return x
    return _rising("floor_div")(x, y) if y.number is not None and y.number > 0 else None


def _floor_mod(x: Whole, y: Whole) -> Whole | None:
    """Exact within a period, else the whole period."""
    least, most = x.form.range
    if y.number is None or y.number < 1:
        return None
    if 0 <= least and most < y.number:
        return x
    size = integer(y.number)
    same = applied("eq", *(applied("floor_div", end, size) for end in (x.low, x.high)))
    low, high = (
        applied("where", same, applied("floor_mod", end, size), integer(otherwise))
        for end, otherwise in ((x.low, 0), (x.high, y.number - 1))
    )
    return Whole(single(low, high, 0, y.number - 1))


_RULES: dict[str, _Rule] = {
    "add": lambda x, y: Whole(x.form.plus(y.form)),
    "sub": lambda x, y: Whole(x.form.plus(y.form, -1)),
    "mul": _mul,
    "neg": lambda x: Whole(x.form.times(-1)),
    "abs": _abs,
    "minimum": _rising("minimum"),
    "maximum": _rising("maximum"),
    "floor_div": _floor_div,
    "floor_mod": _floor_mod,
    "cast": lambda x: x,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """must: true of every element of the tile. may: not false of every element."""

    must: Expr
    may: Expr


OPEN = Flag(FALSE, TRUE)


def known(value: Expr) -> Flag:
    """A condition that is the same for all elements."""
    return Flag(value, value)


def nonzero(x: Whole | None) -> Flag:
    """The verdicts on an integer's not being 0."""
    return compare("ne", [x, Whole.of(0)])


def compare(op: str, operands: Sequence[Whole | None]) -> Flag:
    """lt, le, eq or ne of two integers: by the range of their difference."""
    x, y = operands if len(operands) == 2 else (None, None)
    if x is None or y is None:
        return OPEN
    difference = x.form.plus(y.form, -1)
    least, most = difference.range
    if least < -LARGEST or most > LARGEST:
        return OPEN
    sure = both(x.sure, y.sure)
    low, high, zero = difference.low, difference.high, integer(0)
    if op in ("lt", "le"):
        must, may = applied(op, high, zero), applied(op, low, zero)
    elif op in ("eq", "ne"):
        may = both(applied("le", low, zero), applied("le", zero, high))
        must = both(applied("eq", low, zero), applied("eq", high, zero))
        if op == "ne":
            must, may = applied("not", may), applied("not", must)
    else:
        return OPEN
    return Flag(both(must, sure), applied("or", may, applied("not", sure)))


def combine(op: str, operands: Sequence[Flag]) -> Flag:
    """An operation on conditions alone."""
    rule = _LOGIC.get(op)
    return OPEN if rule is None else rule(*operands)


def _opposite(x: Flag) -> Flag:
    return Flag(applied("not", x.may), applied("not", x.must))


def _all(x: Flag, y: Flag) -> Flag:
    return Flag(both(x.must, y.must), both(x.may, y.may))


def _any(x: Flag, y: Flag) -> Flag:
    return Flag(applied("or", x.must, y.must), applied("or", x.may, y.may))


def _chosen(condition: Flag, x: Flag, y: Flag) -> Flag:
    chosen = _any(_all(condition, x), _all(_opposite(condition), y))
    # Kept either way, whatever the condition is.
    return Flag(applied("or", chosen.must, both(x.must, y.must)), chosen.may)


_LOGIC: dict[str, Callable[..., Flag]] = {
    "and": _all,
    "or": _any,
    "not": _opposite,
    "where": _chosen,
    "cast": lambda x: x,
}
