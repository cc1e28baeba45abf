"""Ranges of numbers: which integers an Expr can be, and whether a float can be near the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flexattn.mods.expr import Expr, once, walk
from flexattn.mods.ops import OPS, Range, dtype_of, is_float, is_int
from flexattn.mods.simplify import clamped


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

    def limited(self, expr: Expr, low: int, high: int) -> Expr:
        """The integer, clamped to these ends where it may be outside of them."""
        found = self(expr)
        inside = found is not None and low <= found[0] and found[1] <= high
        return expr if inside else clamped(expr, low, high)


def intervals_of(
    expr: Expr, ranges: Mapping[str, Range], *others: Expr
) -> dict[Expr, Range | None]:
    """The ranges of an Expr, of others, and of everything they are made of, in one pass."""
    interval = Intervals(ranges)
    for root in (expr, *others):
        interval(root)
    return interval.known


def dtype_range(dtype: str) -> Range:
    """The smallest and largest value of an integer dtype or bool."""
    if dtype == "bool":
        return 0, 1
    info = torch.iinfo(dtype_of(dtype))
    return info.min, info.max


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
        least, most = known[0]
        low, high = int(least > 0 or most < 0), int((least, most) != (0, 0))
        return (low, high) if node.op == "cast" else (1 - high, 1 - low)
    rule = OPS[node.op].interval if node.op in OPS else None
    result = known[0] if node.op == "cast" else rule(*known) if rule else None
    if result is None or result[0] < limits[0] or result[1] > limits[1]:
        return limits  # it may wrap
    return result


# Scores are taken to be below this number, and captured numbers as factors, too: a product of a
# captured slope and a distance reaches no end that a user means.
_USUAL = 2.0**40
_END = 2.3e38
_GROWING = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "tan", "pow", "lgamma"))
_BOUNDED = frozenset(("tanh", "sigmoid", "erf", "erfc", "sin", "cos", "sign", "atan", "atan2"))
_WIDE = ("float32", "float64", "bfloat16")


@once
def reaches_end(expr: Expr) -> bool:
    """True if an Expr may be a finite number beyond 2.3e38, of either sign.

    A captured tensor's element may be finfo.min where it is added or chosen, and so may a number
    that changes from call to call.
    """
    found: dict[Expr, tuple[float, bool]] = {}
    for node in walk(expr):
        found[node] = _largest(node, [found[arg] for arg in node.args])
    largest, unknown = found[expr]
    return unknown or largest > _END


def _largest(node: Expr, args: list[tuple[float, bool]]) -> tuple[float, bool]:
    """(a bound of the magnitude, whether a captured number may be beyond it)."""
    if not is_float(node.dtype):
        return 2.0**31, False
    if node.op == "const":
        value = abs(float(node.value or 0))
        return (value if math.isfinite(value) else 0.0), False
    if node.op in ("load", "scalar"):
        return _USUAL, node.dtype in _WIDE
    if node.op == "var" or not args:
        return _USUAL, False
    if node.op in _BOUNDED:
        return 2.0, False
    if node.op in _GROWING:  # an exponential depends on how far its operand goes
        bounded = node.op in ("exp", "exp2", "expm1") and args[0][0] <= 88.0
        return math.exp(args[0][0]) if bounded else math.inf, False
    if node.op == "where":
        args = args[1:]
    bounds, unknown = [bound for bound, _ in args], any(each for _, each in args)
    if node.op in ("add", "sub"):
        return sum(bounds), unknown
    if node.op == "mul":
        return bounds[0] * bounds[1], args[0][1] and args[1][1]
    if node.op in ("div", "reciprocal"):
        divisor = node.args[-1]
        least = abs(float(divisor.value or 0)) if divisor.op == "const" else 1 / _USUAL
        above = bounds[0] if node.op == "div" else 1.0
        return (above / least if least else 0.0), node.op == "div" and args[0][1]
    return max(bounds), unknown
