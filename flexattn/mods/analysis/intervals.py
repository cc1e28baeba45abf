"""Interval arithmetic: which integers an Expr can be, given the ranges of its variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flexattn.mods.expr import Expr, walk
from flexattn.mods.ops import is_int

__all__ = ["Range", "dtype_range", "interval_of", "intervals_of"]

Range = tuple[int, int]


def interval_of(expr: Expr, ranges: Mapping[str, Range]) -> Range | None:
    """The inclusive range of an integer or bool Expr; None for a float.

    Sound: no value outside the range can occur while the variables stay in theirs, wrapping
    on overflow included. Variables that are not named, run-time scalars and integers from
    memory may be anything their dtype holds.
    """
    return intervals_of(expr, ranges)[expr]


def intervals_of(expr: Expr, ranges: Mapping[str, Range]) -> dict[Expr, Range | None]:
    """`interval_of` for an Expr and everything it is made of, in one pass."""
    found: dict[Expr, Range | None] = {}
    for node in walk(expr):
        found[node] = _interval(node, [found[arg] for arg in node.args], ranges)
    return found


def dtype_range(dtype: str) -> Range:
    """The smallest and largest value of an integer dtype or bool."""
    if dtype == "bool":
        return 0, 1
    bits = int(dtype.lstrip("uint"))
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _interval(node: Expr, args: list[Range | None], ranges: Mapping[str, Range]) -> Range | None:
    if not is_int(node.dtype) and node.dtype != "bool":
        return None
    limits = dtype_range(node.dtype)
    if node.op == "const":
        return int(node.value or 0), int(node.value or 0)
    if node.op == "var":
        return ranges.get(str(node.value), limits)
    if node.op == "where":
        args = args[1:]
    rule = _RULES.get(node.op)
    known = [arg for arg in args if arg is not None]
    if rule is None or len(known) < len(args) or not known:
        return limits
    if node.dtype == "bool" and node.op in ("cast", "not"):
        low, high = _to_bool(known[0])
        return (low, high) if node.op == "cast" else (1 - high, 1 - low)
    result = rule(*known)
    if result is None or result[0] < limits[0] or result[1] > limits[1]:
        return limits  # it may wrap
    return result


def _to_bool(x: Range) -> Range:
    return int(x[0] > 0 or x[1] < 0), int(x != (0, 0))


def _corners(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(x: Range, y: Range) -> Range:
        values = [op(i, j) for i in x for j in y]
        return min(values), max(values)

    return rule


def _abs(x: Range) -> Range:
    low = 0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1]))
    return low, max(abs(x[0]), abs(x[1]))


def _truncate(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _dividing(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    def rule(x: Range, y: Range) -> Range | None:
        # A divisor of either sign reaches its extremes at its ends and next to zero.
        ends = {j for j in (y[0], y[1], -1, 1) if j != 0 and y[0] <= j <= y[1]}
        if y[0] <= 0 <= y[1]:  # the machine decides what a division by zero gives
            return None
        values = [op(i, j) for i in x for j in ends]
        return min(values), max(values)

    return rule


def _floor_mod(x: Range, y: Range) -> Range | None:
    if y[0] > 0 and x[0] >= 0:
        return x if x[1] < y[0] else (0, min(x[1], y[1] - 1))
    if y[0] > 0:
        return 0, y[1] - 1
    return (y[0] + 1, 0) if y[1] < 0 else None


def _trunc_mod(x: Range, y: Range) -> Range | None:
    if y[0] <= 0 <= y[1]:
        return None
    most = max(abs(y[0]), abs(y[1])) - 1
    return max(-most, min(x[0], 0)), min(most, max(x[1], 0))


def _and(x: Range, y: Range) -> Range | None:
    positive = [r for r in (x, y) if r[0] >= 0]
    return (0, min(r[1] for r in positive)) if positive else None


def _or(x: Range, y: Range) -> Range | None:
    if x[0] < 0 or y[0] < 0:
        return None
    return max(x[0], y[0]), 2 ** max(x[1].bit_length(), y[1].bit_length()) - 1


def _xor(x: Range, y: Range) -> Range | None:
    if x[0] < 0 or y[0] < 0:
        return None
    return 0, 2 ** max(x[1].bit_length(), y[1].bit_length()) - 1


def _shl(x: Range, y: Range) -> Range | None:
    return _corners(lambda i, j: i << j)(x, y) if y[0] >= 0 and y[1] < 64 else None


def _shr(x: Range, y: Range) -> Range | None:
    return _corners(lambda i, j: i >> j)(x, y) if y[0] >= 0 and y[1] < 64 else None


def _sign(x: Range) -> Range:
    return (x[0] > 0) - (x[0] < 0), (x[1] > 0) - (x[1] < 0)


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _corners(lambda i, j: i * j),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _abs,
    "sign": _sign,
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "where": lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "floor_div": _dividing(lambda i, j: i // j),
    "trunc_div": _dividing(_truncate),
    "floor_mod": _floor_mod,
    "trunc_mod": _trunc_mod,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": lambda x: (~x[1], ~x[0]),
    "shl": _shl,
    "shr": _shr,
    "cast": lambda x: x,
}
