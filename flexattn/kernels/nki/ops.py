"""How NKI spells each operation of an Expr that its engines compute."""

from __future__ import annotations

import math

from flexattn.mods.expr import Expr
from flexattn.mods.ops import OPS

# Integers that float32 holds exactly.
EXACT = 2**24

BINARY = {op.name: op.nki.name for op in OPS.values() if op.nki and op.nki.how == "tensors"}
# The operation that gives the same with its operands swapped, where it is another.
MIRRORED = {op.name: op.mirrored for op in OPS.values() if op.mirrored}
HALF_POOLS = {"bfloat16": "tile_bf16", "float16": "tile_f16"}


def number_text(node: Expr) -> str:
    """A constant; infinities as a product that overflows, which needs no function call."""
    value = node.value
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "(-INFINITY)" if value < 0 else "INFINITY" if value > 0 else "(INFINITY - INFINITY)"
    return f"({value!r})" if isinstance(value, int | float) and value < 0 else repr(value)
