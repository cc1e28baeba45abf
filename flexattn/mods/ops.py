"""The pointwise operations an Expr is made of, and what torch calls them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flexattn.mods.expr import Expr, const

__all__ = ["OPS", "Op", "dtype_of", "fold", "is_float", "is_int"]


@dataclass(frozen=True, slots=True)
class Op:
    """A pointwise operation.

    Operands share the result's dtype; with `predicate` the result is bool whatever they are.
    `called` is the name of the function in torch that defines it, `kwargs` its fixed options.
    `commutes` means that swapping the operands changes no bit of the result.
    """

    name: str
    arity: int
    called: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    predicate: bool = False
    commutes: bool = False

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """torch's function."""
        found: Callable[..., torch.Tensor] = getattr(torch, self.called)
        return found


def _ops() -> dict[str, Op]:
    unary = (
        "neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan "
        "asin acos atan sinh cosh tanh sigmoid erf erfc floor ceil round trunc"
    )
    binary = {
        "sub": "sub", "div": "div", "floor_div": "floor_divide", "floor_mod": "remainder",
        "trunc_mod": "fmod", "minimum": "minimum", "maximum": "maximum", "pow": "pow",
        "atan2": "atan2", "shl": "bitwise_left_shift", "shr": "bitwise_right_shift",
    }  # fmt: skip
    commuting = {
        "add": "add", "mul": "mul", "and": "bitwise_and", "or": "bitwise_or",
        "xor": "bitwise_xor",
    }  # fmt: skip
    ops = [Op(name, 1, name) for name in unary.split()]
    ops += [Op(name, 2, called) for name, called in binary.items()]
    ops += [Op(name, 2, called, commutes=True) for name, called in commuting.items()]
    ops += [Op(name, 2, name, predicate=True) for name in ("lt", "le", "gt", "ge")]
    ops += [Op(name, 2, name, predicate=True, commutes=True) for name in ("eq", "ne")]
    ops += [Op(name, 1, name, predicate=True) for name in ("isnan", "isinf")]
    ops += [
        Op("not", 1, "bitwise_not"),
        Op("where", 3, "where"),
        Op("trunc_div", 2, "div", {"rounding_mode": "trunc"}),
    ]
    return {op.name: op for op in ops}


OPS = _ops()


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def is_float(dtype: str) -> bool:
    """Whether a dtype's name says floating point."""
    return dtype.startswith(("float", "bfloat"))


def is_int(dtype: str) -> bool:
    """Whether a dtype's name says integer; bool is none."""
    return dtype.startswith(("int", "uint"))


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
