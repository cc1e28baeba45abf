"""The operators that instructions take as `op`: what they compute, and where that is valid.

[shared] is nki/api/nki.api.shared of the AWS Neuron documentation: its tables of math operators
and of activation functions with their valid input ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Operator:
    """One nl.* operator. unary: an activation function.

    reduces: it can reduce along the free dimension. valid: smallest and largest magnitude of an
    input for which the Scalar Engine's tables hold; outside of it the result is NaN here.
    """

    name: str
    function: Callable[..., Tensor]
    unary: bool = False
    reduces: Callable[[Tensor], Tensor] | None = None
    valid: tuple[float, float] | None = None
    signed: bool = False

    def __call__(self, *args: Any) -> Tensor:
        result: Tensor = self.function(*args)
        if self.valid is None:
            return result
        low, high = self.valid
        x = args[0].abs() if self.signed else args[0]
        return torch.where((x >= low) & (x <= high), result, math.nan)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _compare(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A comparison's result is a number: 1 or 0."""
    return lambda x, y: function(x, y).to(torch.float32)


def _logical(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, y: Tensor | float) -> Tensor:
        other = y != 0 if isinstance(y, Tensor) else torch.tensor(bool(y))
        return function(x != 0, other).to(torch.float32)

    return apply


def _extreme(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(x, torch.as_tensor(y, dtype=torch.float32))


def _binary() -> list[Operator]:
    arithmetic: dict[str, Callable[..., Tensor]] = {"subtract": torch.sub, "power": torch.pow}
    compared = {
        "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt,
        "less_equal": torch.le, "greater": torch.gt, "greater_equal": torch.ge,
    }  # fmt: skip
    logical = {
        "logical_and": torch.logical_and, "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
    }  # fmt: skip
    return [
        Operator("add", torch.add, reduces=lambda x: x.sum(1, keepdim=True)),
        Operator("multiply", torch.mul, reduces=lambda x: x.prod(1, keepdim=True)),
        Operator("maximum", _extreme(torch.maximum), reduces=lambda x: x.amax(1, keepdim=True)),
        Operator("minimum", _extreme(torch.minimum), reduces=lambda x: x.amin(1, keepdim=True)),
        *(Operator(name, function) for name, function in arithmetic.items()),
        *(Operator(name, _compare(function)) for name, function in compared.items()),
        *(Operator(name, _logical(function)) for name, function in logical.items()),
    ]


def _unary() -> list[Operator]:
    everywhere: dict[str, Callable[..., Tensor]] = {
        "copy": torch.clone, "square": torch.square, "sigmoid": torch.sigmoid,
        "relu": torch.relu, "tanh": torch.tanh, "erf": torch.erf, "exp": torch.exp,
        "sign": torch.sign, "abs": torch.abs, "softplus": torch.nn.functional.softplus,
    }  # fmt: skip
    # [shared] "Supported Activation Functions", the column of valid ranges.
    ranged = {
        "log": (torch.log, 2.0**-64, 2.0**64, False),
        "sqrt": (torch.sqrt, 2.0**-116, 2.0**118, False),
        "rsqrt": (torch.rsqrt, 2.0**-87, 2.0**97, False),
        "reciprocal": (torch.reciprocal, 2.0**-42, 2.0**42, True),
        "sin": (torch.sin, 0.0, math.pi, True),
        "arctan": (torch.arctan, 0.0, math.pi / 2, True),
    }
    return [
        *(Operator(name, function, unary=True) for name, function in everywhere.items()),
        *(
            Operator(name, function, unary=True, valid=(low, high), signed=signed)
            for name, (function, low, high, signed) in ranged.items()
        ),
    ]


OPERATORS: dict[str, Operator] = {each.name: each for each in (*_binary(), *_unary())}
