"""Conditions over a tile: whether each element fulfils them, and whether any may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexattn.mods.algebra.forms import LARGEST, both, integer, truth
from flexattn.mods.algebra.whole import Whole
from flexattn.mods.expr import Expr
from flexattn.mods.simplify import applied


@dataclass(frozen=True, slots=True)
class Flag:
    """must: true of every element of the tile. may: not false of every element."""

    must: Expr
    may: Expr


OPEN = Flag(truth(False), truth(True))


def known(value: Expr) -> Flag:
    """A condition that is the same for all elements."""
    return Flag(value, value)


def nonzero(x: Whole | None) -> Flag:
    """Whether an integer is not 0."""
    return compare("ne", [x, Whole.of(0)])


def compare(op: str, operands: Sequence[Whole | None]) -> Flag:
    """lt, le, gt, ge, eq or ne of two integers: by the range of their difference."""
    x, y = operands if len(operands) == 2 else (None, None)
    if x is None or y is None or op not in _COMPARISONS:
        return OPEN
    difference = x.form.plus(y.form, -1)
    least, most = difference.range
    if least < -LARGEST or most > LARGEST:
        return OPEN
    must, may = _COMPARISONS[op](difference.low, difference.high)
    sure = both(x.sure, y.sure)
    return Flag(both(must, sure), applied("or", may, applied("not", sure)))


def combine(op: str, operands: Sequence[Flag]) -> Flag:
    """An operation on conditions alone."""
    rule = _LOGIC.get(op)
    return OPEN if rule is None else rule(*operands)


def _equal(low: Expr, high: Expr) -> tuple[Expr, Expr]:
    return both(_is("eq", low), _is("eq", high)), both(_is("le", low), _is("ge", high))


def _differ(low: Expr, high: Expr) -> tuple[Expr, Expr]:
    must, may = _equal(low, high)
    return applied("not", may), applied("not", must)


def _is(op: str, x: Expr) -> Expr:
    return applied(op, x, integer(0))


_COMPARISONS: dict[str, Callable[[Expr, Expr], tuple[Expr, Expr]]] = {
    "lt": lambda low, high: (_is("lt", high), _is("lt", low)),
    "le": lambda low, high: (_is("le", high), _is("le", low)),
    "gt": lambda low, high: (_is("gt", low), _is("gt", high)),
    "ge": lambda low, high: (_is("ge", low), _is("ge", high)),
    "eq": _equal,
    "ne": _differ,
}


def _opposite(x: Flag) -> Flag:
    return Flag(applied("not", x.may), applied("not", x.must))


def _and(x: Flag, y: Flag) -> Flag:
    return Flag(both(x.must, y.must), both(x.may, y.may))


def _or(x: Flag, y: Flag) -> Flag:
    return Flag(applied("or", x.must, y.must), applied("or", x.may, y.may))


def _xor(x: Flag, y: Flag) -> Flag:
    return _or(_and(x, _opposite(y)), _and(_opposite(x), y))


def _where(condition: Flag, x: Flag, y: Flag) -> Flag:
    chosen = _or(_and(condition, x), _and(_opposite(condition), y))
    # Kept either way, whatever the condition is.
    return Flag(applied("or", chosen.must, both(x.must, y.must)), chosen.may)


_LOGIC: dict[str, Callable[..., Flag]] = {
    "and": _and,
    "minimum": _and,
    "mul": _and,
    "or": _or,
    "maximum": _or,
    "xor": _xor,
    "ne": _xor,
    "eq": lambda x, y: _opposite(_xor(x, y)),
    "lt": lambda x, y: _and(_opposite(x), y),
    "le": lambda x, y: _or(_opposite(x), y),
    "gt": lambda x, y: _and(x, _opposite(y)),
    "ge": lambda x, y: _or(x, _opposite(y)),
    "not": _opposite,
    "where": _where,
    "cast": lambda x: x,
}
