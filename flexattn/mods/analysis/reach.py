"""Whether a score can be so near to float32's end that its product with log2(e) overflows."""

from __future__ import annotations

import math
from functools import lru_cache

from flexattn.mods.expr import Expr, walk
from flexattn.mods.ops import is_float

# Scores are taken to be below this number, and captured numbers as factors, too: a product of a
# captured slope and a distance reaches no end that a user means.
_USUAL = 2.0**40
_END = 2.3e38
_GROWING = frozenset(("exp", "exp2", "expm1", "sinh", "cosh", "tan", "pow", "lgamma"))
_BOUNDED = frozenset(("tanh", "sigmoid", "erf", "erfc", "sin", "cos", "sign", "atan", "atan2"))
_WIDE = ("float32", "float64", "bfloat16")


@lru_cache(maxsize=1024)
def reaches_end(expr: Expr) -> bool:
    """Whether an Expr may be a finite number beyond 2.3e38, of either sign.

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
    if node.op in _GROWING:
        return (_grown(node.op, args[0][0]), False)
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


def _grown(op: str, bound: float) -> float:
    """Of a function that grows fast; only of an exponential it depends on how far it goes."""
    if op in ("exp", "exp2", "expm1") and bound <= 88.0:
        return math.exp(bound)
    return math.inf
