"""Floats over a tile: two ends in float64, each moved outward by more than a rounding moves it.

No two chips round alike, and a compiler may fuse a product into a sum. So after every operation
the ends give way by several units in the last place of the operation's dtype: whatever is computed
lies between them. Numbers near a dtype's largest, infinities and NaN are not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexattn.mods.algebra.whole import (
    OPEN,
    TRUE,
    Flag,
    Whole,
    both,
    by_rule,
    chosen_ends,
    flag_ends,
    hull,
    magnitude,
    rising,
    single,
    verdict,
)
from flexattn.mods.expr import Expr, const
from flexattn.mods.ops import EVERYWHERE, OPS
from flexattn.mods.simplify import applied, clamped, make

# Of each dtype: the relative and the absolute error that is allowed for, and the largest number.
_ROUNDING = {
    "float64": (2.0**-44, 1e-200, 2.0**300),
    "float32": (2.0**-19, 1e-30, 2.0**100),
    "bfloat16": (2.0**-5, 1e-30, 2.0**100),
    "float16": (2.0**-8, 2.0**-12, 2.0**14),
}
_WHOLE = 2.0**48


@dataclass(frozen=True, slots=True)
class Real:
    """A float of the mod between two float64 expressions, where `sure` holds."""

    low: Expr
    high: Expr
    sure: Expr = TRUE


def exact(low: Expr, high: Expr, dtype: str) -> Real | None:
    """A number that is read, not computed: a constant, an argument, an entry of a tensor."""
    if dtype not in _ROUNDING:
        return None
    return Real(low, high, _limits(low, high, _ROUNDING[dtype][2]))


def of_whole(x: Whole | None, dtype: str) -> Real | None:
    """An integer as a float."""
    if x is None:
        return None
    low, high = (make("cast", "float64", (end,)) for end in (x.low, x.high))
    return _rounded(Real(low, high, x.sure), dtype)


def of_flag(flag: Flag) -> Real:
    """A condition as 0.0 or 1.0."""
    return Real(*flag_ends(flag, "float64"))


def to_whole(x: Real | None) -> Whole | None:
    """A float as an integer, towards zero: between the whole numbers around its ends."""
    if x is None:
        return None
    sure = both(x.sure, _limits(x.low, x.high, _WHOLE))
    low, high = (
        make("cast", "int64", (clamped(applied(op, end), -_WHOLE, _WHOLE),))
        for op, end in (("floor", x.low), ("ceil", x.high))
    )
    return Whole(single(low, high, -int(_WHOLE), int(_WHOLE)), sure)


def apply(op: str, operands: Sequence[Real | None], dtype: str) -> Real | None:
    """The result of an operation in its dtype; None: nothing is known."""
    found: Real | None = by_rule(_RULES, op, operands)
    return None if found is None else _rounded(found, dtype)


def choose(condition: Flag, x: Real | None, y: Real | None) -> Real | None:
    """where(condition, x, y): both where the condition does not decide."""
    if x is None or y is None:
        return None
    return Real(*chosen_ends(condition, x, y), both(x.sure, y.sure))


def compare(op: str, operands: Sequence[Real | None]) -> Flag:
    """lt, le, eq or ne of two floats."""
    x, y = operands if len(operands) == 2 else (None, None)
    if x is None or y is None:
        return OPEN
    return verdict(op, x, y, exact=False)


def _number(value: float) -> Expr:
    return const(value, "float64")


def _limits(low: Expr, high: Expr, most: float) -> Expr:
    """False of NaN too."""
    return both(applied("le", _number(-most), low), applied("le", high, _number(most)))


def _rounded(x: Real, dtype: str) -> Real | None:
    if dtype not in _ROUNDING:
        return None
    relative, absolute, most = _ROUNDING[dtype]

    def moved(op: str, end: Expr) -> Expr:
        size = applied("mul", applied("abs", end), _number(relative))
        return applied(op, end, applied("add", size, _number(absolute)))

    return Real(
        moved("sub", x.low), moved("add", x.high), both(x.sure, _limits(x.low, x.high, most))
    )


def _neg(x: Real) -> Real:
    return Real(*(applied("neg", end) for end in (x.high, x.low)))


def _div(x: Real, y: Real) -> Real:
    zero = _number(0.0)
    sure = applied("or", *(
        applied("lt", *pair) for pair in ((zero, y.low), (y.high, zero))
    ))  # fmt: skip
    return Real(*hull("div", x, y), sure)


def _rising(op: str, least: float) -> Callable[..., Real]:
    """An operation that never falls in any operand, defined above `least`."""

    def rule(*operands: Real) -> Real:
        sure = TRUE
        if least != EVERYWHERE:
            sure = applied("lt", _number(least), operands[0].low)
        return Real(*rising(op, *operands), sure)

    return rule


_RULES: dict[str, Callable[..., Real]] = {
    "add": _rising("add", EVERYWHERE),
    "sub": lambda x, y: Real(*rising("add", x, _neg(y))),
    "mul": lambda x, y: Real(*hull("mul", x, y)),
    "div": _div,
    "neg": _neg,
    "abs": lambda x: Real(*magnitude(x)),
    "cast": lambda x: x,
    **{op.name: _rising(op.name, op.rises) for op in OPS.values() if op.rises is not None},
}
