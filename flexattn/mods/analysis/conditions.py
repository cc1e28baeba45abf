"""Conditions as lists of terms, and which variables they read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from flexattn.mods.expr import Expr, walk
from flexattn.mods.simplify import make

__all__ = ["conjunction", "reads", "terms_of"]


def terms_of(expr: Expr, op: str) -> list[Expr]:
    """The terms of a chain of "and" or "or"; an Expr of another op is its only term."""
    if expr.op == op and expr.dtype == "bool":
        return [term for arg in expr.args for term in terms_of(arg, op)]
    return [expr]


def conjunction(terms: Iterable[Expr]) -> Expr | None:
    """The terms joined by "and"; None where there are none."""
    found = list(terms)
    return reduce(lambda x, y: make("and", "bool", (x, y)), found) if found else None


def reads(expr: Expr, *names: str) -> bool:
    """Whether one of these variables reaches an Expr."""
    return any(node.op == "var" and node.value in names for node in walk(expr))
