"""gradient(): what an operation of an Expr hands back to one of its operands, as another Expr."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flexattn.errors import UnsupportedError
from flexattn.mods.expr import Expr, const
from flexattn.mods.ops import OPS, is_float
from flexattn.mods.simplify import make


def gradient(node: Expr, place: int, grad: Expr) -> Expr:
    """The gradient of a node's operand, by torch's conventions, from that of the node.

    node: an operation of OPS, or a cast. place: the operand's. The result has the operand's dtype.
    Raises UnsupportedError where torch has none, or where none is known.
    """
    operand = node.args[place]
    if node.op == "cast" and is_float(node.dtype) and is_float(operand.dtype):
        return make("cast", operand.dtype, (grad,))
    rule = "a cast of integers ends it" if node.op == "cast" else OPS[node.op].gradients[place]
    if isinstance(rule, str):
        raise UnsupportedError(
            f"the gradient of {node.op} with respect to operand {place}",
            rule,
            "detach what the mod reads there, or write it with other operations",
        )
    found = rule(_Number(grad), *map(_Number, node.args))
    return found.expr if isinstance(found, _Number) else const(found, operand.dtype)


def _operator(op: str) -> Callable[..., _Number]:
    return lambda *operands: _made(op, *operands)


class _Number:
    """An Expr with torch's operators and methods, in which the rows of OPS are written."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __getattr__(self, op: str) -> Callable[..., _Number]:
        if op not in OPS:
            raise AttributeError(op)
        return partial(_made, op, self)

    __add__, __sub__, __mul__, __truediv__ = map(_operator, ("add", "sub", "mul", "div"))
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("lt", "le", "gt", "ge"))
    __neg__, __invert__, __or__ = map(_operator, ("neg", "not", "or"))
    __eq__, __ne__ = map(_operator, ("eq", "ne"))  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __rsub__(self, other: float) -> _Number:
        return _made("sub", _Number(_of(other, self)), self)

    def where(self, condition: _Number, other: Any) -> _Number:
        """torch.where(condition, self, other)."""
        return _Number(
            make("where", self.expr.dtype, (condition.expr, self.expr, _of(other, self)))
        )


def _of(value: Any, like: _Number) -> Expr:
    return value.expr if isinstance(value, _Number) else const(value, like.expr.dtype)


def _made(op: str, x: _Number, *others: Any) -> _Number:
    dtype = "bool" if OPS[op].predicate else x.expr.dtype
    return _Number(make(op, dtype, (x.expr, *(_of(other, x) for other in others))))
