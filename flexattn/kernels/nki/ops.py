"""How NKI spells each operation of an Expr that its engines compute."""

from __future__ import annotations

import math

from flexattn.mods.expr import Expr

__all__ = ["ACTIVATIONS", "BINARY", "EXACT", "HALF_POOLS", "MIRRORED", "UNARY", "number"]

# Integers that float32 holds exactly.
EXACT = 2**24
LN2, LOG2E = math.log(2.0), 1.0 / math.log(2.0)

BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply",
    "minimum": "minimum", "maximum": "maximum",
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
    "gt": "greater", "ge": "greater_equal",
    "and": "logical_and", "or": "logical_or", "xor": "logical_xor",
}  # fmt: skip
# The operation that gives the same with its operands swapped, where it is another.
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
# name: (activation, what the operand is multiplied by, what the result is multiplied by).
ACTIVATIONS = {
    "exp": ("exp", 1.0, 1.0), "exp2": ("exp", LN2, 1.0),
    "log": ("log", 1.0, 1.0), "log2": ("log", 1.0, LOG2E),
    "tanh": ("tanh", 1.0, 1.0), "sigmoid": ("sigmoid", 1.0, 1.0),
    "erf": ("erf", 1.0, 1.0), "sign": ("sign", 1.0, 1.0),
}  # fmt: skip
UNARY = frozenset("neg not abs isnan floor ceil round sqrt rsqrt".split())
HALF_POOLS = {"bfloat16": "tile_bf16", "float16": "tile_f16"}


def number(node: Expr) -> str:
    """A constant; infinities as a product that overflows, which needs no function call."""
    value = node.value
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "(-INFINITY)" if value < 0 else "INFINITY" if value > 0 else "(INFINITY - INFINITY)"
    return f"({value!r})" if isinstance(value, int | float) and value < 0 else repr(value)
