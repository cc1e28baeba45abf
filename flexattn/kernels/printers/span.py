"""Which keys a mask can keep for some rows of a request: what a serving kernel skips pages by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods import Mod
from flexattn.mods.expr import Expr, depending, walk
from flexattn.mods.ops import is_int
from flexattn.mods.simplify import make

__all__ = ["Edge", "bounds_of", "edges", "free_bounds_of", "free_edges"]

Bound: TypeAlias = tuple[bool, int, int, Expr | None]


@dataclass(frozen=True, slots=True)
class Edge:
    """A bound of the keys that a mask keeps: slope * q_idx + offset + rest.

    lowest: no key below it is kept; else: no key from it on. statements, rest: Triton's text for
    the part that the request alone decides; "0" where there is none.
    """

    lowest: bool
    slope: int
    offset: int
    statements: tuple[str, ...]
    rest: str

    @property
    def query(self) -> str:
        """The end of a range of queries where the bound is loosest."""
        return "q_first" if self.lowest == (self.slope > 0) else "q_last"

    @property
    def tight_query(self) -> str:
        """The end of a range of queries where the bound is tightest."""
        return "q_last" if self.query == "q_first" else "q_first"


@dataclass(frozen=True, slots=True)
class _Linear:
    """kv * kv_idx + q * q_idx + number + rest, where rest is an Expr of the request or nothing."""

    kv: int = 0
    q: int = 0
    number: int = 0
    rest: Expr | None = None


def edges(mod: Mod, contiguous: tuple[bool, ...], traits: Traits) -> tuple[Edge, ...]:
    """The bounds that follow from a mask's conjunction of comparisons, each linear in kv_idx.

    Sound and not complete: a term that is anything else bounds nothing. A bound is exact where
    its rest reads the request and captured values alone, never the head.
    """
    return _printed(mod, bounds_of(mod), contiguous, traits)


def free_edges(mod: Mod, contiguous: tuple[bool, ...], traits: Traits) -> tuple[Edge, ...] | None:
    """Bounds between which a mask keeps every key, None where there may be no such keys."""
    found = free_bounds_of(mod)
    return None if found is None else _printed(mod, found, contiguous, traits)


def _printed(
    mod: Mod, bounds: list[Bound], contiguous: tuple[bool, ...], traits: Traits
) -> tuple[Edge, ...]:
    found = []
    for lowest, slope, offset, rest in bounds:
        statements: tuple[str, ...] = ()
        text = "0"
        if rest is not None:
            part = Mod(mod.kind, rest, mod.buffers, mod.scalars, "")
            printed = print_mod(part, contiguous, traits)
            statements, text = (*printed.hoisted, *printed.early), printed.result
        found.append(Edge(lowest, slope, offset, statements, text))
    return tuple(found)


def bounds_of(mod: Mod) -> list[Bound]:
    """(lowest, slope, offset, rest) of each bound of a mask, rest as an Expr."""
    varying = depending(list(walk(mod.expr)), ("score", "h", "q_idx", "kv_idx"))
    return [bound for term in _terms(mod.expr) for bound in _bounds_of_term(term, varying)]


def free_bounds_of(mod: Mod) -> list[Bound] | None:
    """Bounds as of bounds_of, such that a key within all of them is kept."""
    varying = depending(list(walk(mod.expr)), ("score", "h", "q_idx", "kv_idx"))
    return _free(mod.expr, varying)


def _free(expr: Expr, varying: set[Expr]) -> list[Bound] | None:
    if expr.op == "and" and expr.dtype == "bool":
        found = [_free(term, varying) for term in _terms(expr, "and")]
        return None if None in found else [each for bounds in found for each in bounds or ()]
    if expr.op == "or" and expr.dtype == "bool":
        # One that holds is enough.
        able = (_free(term, varying) for term in _terms(expr, "or"))
        return next((each for each in able if each is not None), None)
    return list(_bounds_of_term(expr, varying)) or None


def _terms(expr: Expr, op: str = "and") -> Iterator[Expr]:
    """What must all hold for the expression to hold; of an "or", what is enough alone."""
    if expr.op == op and expr.dtype == "bool":
        for arg in expr.args:
            yield from _terms(arg, op)
    else:
        yield expr


def _bounds_of_term(term: Expr, varying: set[Expr]) -> Iterator[Bound]:
    """(lowest, slope, offset, rest) of each bound that one comparison makes."""
    if term.op not in ("lt", "le", "eq") or not is_int(term.args[0].dtype):
        return
    left, right = (_linear(arg, varying) for arg in term.args)
    if left is None or right is None:
        return
    found = _sum(left, _times(right, -1))
    if found.kv not in (1, -1):
        return
    # found <= 0, or below 0, or both found <= 0 and -found <= 0.
    strict = int(term.op == "lt")
    for each in (found, _times(found, -1)) if term.op == "eq" else (found,):
        if each.kv == 1:  # kv_idx <= -(q + number + rest): the first key that is out is one more
            other = _times(each, -1)
            yield False, other.q, other.number + 1 - strict, other.rest
        else:
            yield True, each.q, each.number + strict, each.rest


def _linear(expr: Expr, varying: set[Expr]) -> _Linear | None:
    if not is_int(expr.dtype):
        return None
    if expr.op == "const":
        return _Linear(number=int(expr.value or 0))
    if expr not in varying:
        return _Linear(rest=make("cast", "int64", (expr,)))
    if expr.op == "var":
        return {"kv_idx": _Linear(kv=1), "q_idx": _Linear(q=1)}.get(str(expr.value))
    if expr.dtype != "int64":  # narrower sums may wrap
        return None
    args = [_linear(arg, varying) for arg in expr.args]
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    if expr.op == "add":
        return _sum(known[0], known[1])
    if expr.op == "sub":
        return _sum(known[0], _times(known[1], -1))
    if expr.op == "neg":
        return _times(known[0], -1)
    if expr.op == "mul" and expr.args[1].op == "const":
        return _times(known[0], known[1].number)
    return known[0] if expr.op == "cast" and is_int(expr.args[0].dtype) else None


def _sum(x: _Linear, y: _Linear) -> _Linear:
    if x.rest is None or y.rest is None:
        rest = x.rest or y.rest
    else:
        rest = make("add", "int64", (x.rest, y.rest))
    return _Linear(x.kv + y.kv, x.q + y.q, x.number + y.number, rest)


def _times(x: _Linear, factor: int) -> _Linear:
    rest = x.rest
    if rest is not None and factor != 1:
        factored = Expr("const", "int64", (), factor)
        rest = make("mul", "int64", (rest, factored))
    return _Linear(x.kv * factor, x.q * factor, x.number * factor, rest)
