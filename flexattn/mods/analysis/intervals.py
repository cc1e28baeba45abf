"""Interval arithmetic: which integers an Expr can be, given the ranges of its variables."""

from __future__ import annotations

from collections.abc import Mapping

from flexattn.mods.expr import Expr, walk
from flexattn.mods.ir.intervals import Range
from flexattn.mods.ops import OPS, is_int


class Intervals:
    """Which integers an Expr can be, None for a float; each node is looked at once.

    Sound: no value outside the inclusive range can occur while the variables stay in theirs,
    wrapping on overflow included. Variables that are not named, run-time scalars and integers
    from memory may be anything their dtype holds.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self.ranges = ranges
        self.known: dict[Expr, Range | None] = {}

    def __call__(self, expr: Expr) -> Range | None:
        known = self.known
        if expr in known:
            return known[expr]
        for node in walk(expr, enter=lambda node: node not in known):
            if node not in known:
                known[node] = _interval(node, [known[arg] for arg in node.args], self.ranges)
        return known[expr]


def interval_of(expr: Expr, ranges: Mapping[str, Range]) -> Range | None:
    """The range of one Expr, as `Intervals` has it."""
    return Intervals(ranges)(expr)


def intervals_of(
    expr: Expr, ranges: Mapping[str, Range], *others: Expr
) -> dict[Expr, Range | None]:
    """`interval_of` for an Expr, others, and everything they are made of, in one pass."""
    interval = Intervals(ranges)
    for root in (expr, *others):
        interval(root)
    return interval.known


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
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args) or not known:
        return limits
    if node.dtype == "bool" and node.op in ("cast", "not"):
        low, high = _to_bool(known[0])
        return (low, high) if node.op == "cast" else (1 - high, 1 - low)
    rule = OPS[node.op].interval if node.op in OPS else None
    result = known[0] if node.op == "cast" else rule(*known) if rule else None
    if result is None or result[0] < limits[0] or result[1] > limits[1]:
        return limits  # it may wrap
    return result


def _to_bool(x: Range) -> Range:
    return int(x[0] > 0 or x[1] < 0), int(x != (0, 0))
