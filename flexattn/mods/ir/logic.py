"""Logic: comparisons, bits, and the choice between two values."""

from __future__ import annotations

from flexattn.mods.ir import intervals
from flexattn.mods.ir.op import Nki, Op

__all__ = ["LOGIC"]

_BITS = "it works on bits"
_STEP = "a condition has no gradient"


def _comparison(name: str, symbol: str, mirrored: str, nki: str) -> Op:
    return Op(
        name,
        f"({{0}} {symbol} {{1}})",
        (_STEP, _STEP),
        result="compared",
        commutes=not mirrored,
        mirrored=mirrored,
        symbol=symbol,
        nki=Nki("tensors", nki),
    )


LOGIC = (
    Op(
        "and",
        "({0} & {1})",
        (_BITS, _BITS),
        called="bitwise_and",
        traced=("bitwise_and", "__and__"),
        commutes=True,
        interval=intervals.both,
        symbol="&",
        nki=Nki("tensors", "logical_and"),
    ),
    Op(
        "or",
        "({0} | {1})",
        (_BITS, _BITS),
        called="bitwise_or",
        traced=("bitwise_or", "__or__"),
        commutes=True,
        interval=intervals.either,
        symbol="|",
        nki=Nki("tensors", "logical_or"),
    ),
    Op(
        "xor",
        "({0} ^ {1})",
        (_BITS, _BITS),
        called="bitwise_xor",
        traced=("bitwise_xor", "__xor__"),
        commutes=True,
        interval=intervals.differ,
        symbol="^",
        nki=Nki("tensors", "logical_xor"),
    ),
    Op(
        "not",
        "(~{0})",
        (_BITS,),
        called="bitwise_not",
        interval=lambda x: (~x[1], ~x[0]),
        nki=Nki("scalar", "equal", number="0.0"),
    ),
    Op(
        "shl",
        "({0} << {1})",
        (_BITS, _BITS),
        called="bitwise_left_shift",
        traced=("bitwise_left_shift", "__lshift__"),
        interval=intervals.shifted_left,
        symbol="<<",
    ),
    Op(
        "shr",
        "({0} >> {1})",
        (_BITS, _BITS),
        called="bitwise_right_shift",
        traced=("bitwise_right_shift", "__rshift__"),
        interval=intervals.shifted_right,
        symbol=">>",
    ),
    _comparison("eq", "==", "", "equal"),
    _comparison("ne", "!=", "", "not_equal"),
    _comparison("lt", "<", "gt", "less"),
    _comparison("le", "<=", "ge", "less_equal"),
    _comparison("gt", ">", "lt", "greater"),
    _comparison("ge", ">=", "le", "greater_equal"),
    Op("isnan", gradients=(_STEP,), result="classified", triton="({0} != {0})", nki=Nki("steps")),
    Op("isinf", gradients=(_STEP,), result="classified", triton='({tl}.abs({0}) == float("inf"))'),
    Op(
        "where",
        "{tl}.where({0}, {1}, {2})",
        (_STEP, lambda g, c, x, y: g.where(c, 0.0), lambda g, c, x, y: g.where(~c, 0.0)),
        interval=lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
        nki=Nki("steps"),
    ),
)
