"""Logic: comparisons, bits, and the choice between two values."""

from __future__ import annotations

from flexattn.mods.ir import intervals
from flexattn.mods.ir.intervals import Interval
from flexattn.mods.ir.op import Op

_BITS = "it works on bits"
_STEP = "a condition has no gradient"


def _comparison(name: str, symbol: str, mirrored: str) -> Op:
    return Op(
        name,
        f"({{0}} {symbol} {{1}})",
        (_STEP, _STEP),
        result="compared",
        commutes=not mirrored,
        mirrored=mirrored,
        symbol=symbol,
    )


def _bits(name: str, symbol: str, called: str, dunder: str, interval: Interval) -> Op:
    return Op(
        name,
        f"({{0}} {symbol} {{1}})",
        (_BITS, _BITS),
        called=called,
        traced=(called, dunder),
        commutes=symbol in "&|^",
        interval=interval,
        symbol=symbol,
    )


LOGIC = (
    _bits("and", "&", "bitwise_and", "__and__", intervals.meet),
    _bits("or", "|", "bitwise_or", "__or__", intervals.either),
    _bits("xor", "^", "bitwise_xor", "__xor__", intervals.differ),
    _bits("shl", "<<", "bitwise_left_shift", "__lshift__", intervals.shifted_left),
    _bits("shr", ">>", "bitwise_right_shift", "__rshift__", intervals.shifted_right),
    Op(
        "not",
        "(~{0})",
        (_BITS,),
        called="bitwise_not",
        interval=lambda x: (~x[1], ~x[0]),
    ),
    _comparison("eq", "==", ""),
    _comparison("ne", "!=", ""),
    _comparison("lt", "<", "gt"),
    _comparison("le", "<=", "ge"),
    _comparison("gt", ">", "lt"),
    _comparison("ge", ">=", "le"),
    Op("isnan", "({0} != {0})", (_STEP,), result="classified"),
    Op("isinf", '({tl}.abs({0}) == float("inf"))', (_STEP,), result="classified"),
    Op(
        "where",
        "{tl}.where({0}, {1}, {2})",
        (_STEP, lambda g, c, x, y: g.where(c, 0.0), lambda g, c, x, y: g.where(~c, 0.0)),
        interval=lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
    ),
)
