"""Integers and conditions over a tile: what each operation does to the two ends of its operands.

An operation without a rule leaves its result unknown, and so is every float: the elements of
blocks that rest on such a result are evaluated.

Ends are exact where every position is read once, as in q - kv. What is read twice, as q is in
q - (q - kv), counts as two that move apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from flexattn.mods.analysis.intervals import dtype_range
from flexattn.mods.expr import Expr, const, integer
from flexattn.mods.ops import OPS, Range
from flexattn.mods.simplify import applied, make

# Sums of numbers below this do not wrap in 64 bits.
LARGEST = 2**61
# Verdicts that are known.
TRUE, FALSE = const(True, "bool"), const(False, "bool")


def both(*terms: Expr) -> Expr:
    """The conjunction of conditions."""
    return reduce(partial(applied, "and"), terms, TRUE)


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer of the mod over a tile, where `sure` holds: else it may be anything.

    low, high: its least and its greatest value, int64 expressions of the tile. range: the numbers
    that it never leaves on any tile. Not sure: it was read outside a captured tensor, or may have
    wrapped in its dtype.
    """

    low: Expr
    high: Expr
    range: Range
    sure: Expr = TRUE

    @classmethod
    def of(cls, value: int) -> Whole:
        """A number."""
        return cls(integer(value), integer(value), (value, value))

    @property
    def number(self) -> int | None:
        """Its value where it is a number."""
        return self.range[0] if self.range[0] == self.range[1] else None


def settled(x: Whole, dtype: str) -> Whole | None:
    """The result of an operation in its dtype; None where its ends do not fit 64 bits."""
    least, most = x.range
    if least < -LARGEST or most > LARGEST:
        return None
    low, high = dtype_range(dtype)
    sure = x.sure
    if least < low:
        sure = both(sure, applied("le", integer(low), x.low))
    if most > high:
        sure = both(sure, applied("le", x.high, integer(high)))
    return replace(x, sure=sure)


def apply(op: str, operands: Sequence[Whole | None]) -> Whole | None:
    """The result of an operation before its dtype limits it; None: nothing is known."""
    rule, known = _RULES.get(op), [x for x in operands if x is not None]
    if rule is None or not known or len(known) < len(operands):
        return None
    found = rule(*known)
    return found and replace(found, sure=both(*(x.sure for x in known)))


def of_flag(flag: Flag) -> Whole:
    """0 or 1."""
    low, high = (make("cast", "int64", (end,)) for end in (flag.must, flag.may))
    return Whole(low, high, (0, 1))


def choose(condition: Flag, x: Whole | None, y: Whole | None) -> Whole | None:
    """where(condition, x, y): both where the condition does not decide."""
    if x is None or y is None:
        return None

    def end(op: str, x: Expr, y: Expr) -> Expr:
        first = applied("where", condition.must, x, applied(op, x, y))
        return applied("where", condition.may, first, y)

    ends = end("minimum", x.low, y.low), end("maximum", x.high, y.high)
    return Whole(*ends, _range("where", x, y), both(x.sure, y.sure))


_Rule = Callable[..., Whole | None]


def _range(op: str, *operands: Whole) -> Range:
    """The numbers that an operation never leaves on any tile."""
    rule = OPS[op].interval
    found = rule(*(x.range for x in operands)) if rule else None
    assert found is not None
    return found


def _ends(op: str, falling: int = -1) -> Callable[..., Whole]:
    """The rule of an operation that never falls in any operand, but never rises in one of them."""

    def rule(*operands: Whole) -> Whole:
        ends = [[x.low, x.high] for x in operands]
        if falling >= 0:
            ends[falling].reverse()
        low, high = (applied(op, *each) for each in zip(*ends, strict=True))
        return Whole(low, high, _range(op, *operands))

    return rule


def _mul(x: Whole, y: Whole) -> Whole | None:
    if x.number is not None:
        x, y = y, x
    if y.number is None:
        return None
    return _ends("mul", 0 if y.number < 0 else -1)(x, y)


def _abs(x: Whole) -> Whole:
    if x.range[0] >= 0:
        return x
    sizes = [applied("abs", end) for end in (x.low, x.high)]
    around = both(applied("le", x.low, integer(0)), applied("le", integer(0), x.high))
    low = applied("where", around, integer(0), applied("minimum", *sizes))
    return Whole(low, applied("maximum", *sizes), _range("abs", x))


def _floor_div(x: Whole, y: Whole) -> Whole | None:
    if y.number == 1:
        return x
    return _ends("floor_div")(x, y) if y.number is not None and y.number > 0 else None


def _floor_mod(x: Whole, y: Whole) -> Whole | None:
    """Exact within a period, else the whole period."""
    least, most = x.range
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
    return Whole(low, high, (0, y.number - 1))


_RULES: dict[str, _Rule] = {
    "add": _ends("add"),
    "sub": _ends("sub", 1),
    "mul": _mul,
    "neg": _ends("neg", 0),
    "abs": _abs,
    "minimum": _ends("minimum"),
    "maximum": _ends("maximum"),
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
    """lt, le, eq or ne of two integers."""
    x, y = operands if len(operands) == 2 else (None, None)
    if x is None or y is None:
        return OPEN
    sure = both(x.sure, y.sure)
    if op in ("lt", "le"):
        must, may = applied(op, x.high, y.low), applied(op, x.low, y.high)
    elif op in ("eq", "ne"):
        may = both(applied("le", x.low, y.high), applied("le", y.low, x.high))
        must = both(applied("eq", x.low, y.high), applied("eq", x.high, y.low))
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
