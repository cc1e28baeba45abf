"""Folding: an operation on constants is the constant that torch computes."""

from __future__ import annotations

import math

import torch

from flexattn.mods.expr import Expr, const
from flexattn.mods.ops import OPS, dtype_of, is_float


def fold(node: Expr) -> Expr | None:
    """The constant that torch computes for an operation on constants, or None where it refuses."""
    shift = node.op in ("shl", "shr")
    if shift and not 0 <= int(node.args[1].value or 0) < 64:  # undefined: left to the machine
        return None
    try:
        args = [_tensor(arg) for arg in node.args]
        if node.op == "cast":
            result = args[0].to(dtype_of(node.dtype))
        else:
            op = OPS[node.op]
            result = op.function(*args, **op.kwargs)
    except (RuntimeError, ArithmeticError, NotImplementedError, TypeError):
        return None
    value = result.item()
    if node.op == "cast" and not is_float(node.dtype) and not _finite(node.args[0]):
        return None
    return const(value, node.dtype)


def _tensor(node: Expr) -> torch.Tensor:
    return torch.tensor(node.value, dtype=dtype_of(node.dtype), device="cpu")


def _finite(node: Expr) -> bool:
    return not isinstance(node.value, float) or math.isfinite(node.value)
