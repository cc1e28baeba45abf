"""Stops: where a score_mod keeps something from autograd, as operations of its Expr.

Both are the identity. Through "detach" no gradient goes; what goes through "own_gradient", where
an autograd Function or a hook decided it, no expression says. Kernels of a forward have neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from flexattn.mods.arrays import Array, Index
from flexattn.mods.expr import Expr, Mod, walk
from flexattn.mods.ops import is_float
from flexattn.mods.simplify import make, renumber
from flexattn.mods.site import Bound, interned

DETACH, OWN_GRADIENT = "detach", "own_gradient"
_STOPS = (DETACH, OWN_GRADIENT)


def stopped(found: Any, stop: str = DETACH) -> Any:
    """What an operation of a mod gave, an array or several, behind a stop; integers have none."""
    if isinstance(found, (list, tuple)):
        return type(found)(stopped(each, stop) for each in found)
    if not isinstance(found, Array) or not is_float(found.dtype):
        return found

    def at(index: Index) -> Expr:
        return make(stop, found.dtype, (found.at(index),))

    array = Array(found.shape, found.dtype, at, weak=found.weak, wraps=found.wraps)
    array.captured = found.captured
    return array


def without_idle_stops(expr: Expr, kind: str) -> Expr:
    """The canonical form without stops that stop no gradient: a mask has none at all.

    Gradients go from the result, by floats alone, to the score and to what is loaded.
    """
    nodes = list(walk(expr))
    stops = [node for node in nodes if node.op in _STOPS]
    if kind != "score" or not stops:
        return _without(expr, stops)
    moving: set[Expr] = set()
    asked = {expr}
    for node in nodes:
        first = node.op == "load" or (node.op == "var" and node.value == "score")
        # What is behind a detached value needs no other stop.
        if (
            is_float(node.dtype)
            and node.op != DETACH
            and (first or not moving.isdisjoint(node.args))
        ):
            moving.add(node)
    for node in reversed(nodes):
        if node in asked and is_float(node.dtype):
            asked.update(arg for arg in node.args if is_float(arg.dtype))
    return _without(expr, [x for x in stops if x not in asked or x.args[0] not in moving])


def without_stops(bound: Bound) -> Bound:
    """A mod as a forward computes it."""
    mod, tensors, scalars = _forward(bound.mod)
    if mod is bound.mod:
        return bound
    return Bound(
        mod, tuple(bound.tensors[i] for i in tensors), tuple(bound.scalars[i] for i in scalars)
    )


@lru_cache(maxsize=1024)
def has_own_gradient(mod: Mod) -> bool:
    """Whether a gradient of a score_mod is not that of its expression."""
    return any(node.op == OWN_GRADIENT for node in walk(mod.expr))


@lru_cache(maxsize=1024)
def _forward(mod: Mod) -> tuple[Mod, tuple[int, ...], tuple[int, ...]]:
    """The Mod without stops, and which slots of the other it has."""
    stops = [node for node in walk(mod.expr) if node.op in _STOPS]
    if not stops:
        return mod, (), ()
    expr, tensors, scalars = renumber(_without(mod.expr, stops))
    buffers = tuple(mod.buffers[i] for i in tensors)
    dtypes = tuple(mod.scalars[i] for i in scalars)
    return interned(mod.kind, expr, buffers, dtypes), tensors, scalars


def _without(expr: Expr, stops: Iterable[Expr]) -> Expr:
    left_out = set(stops)
    if not left_out:
        return expr
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        args = [done[arg] for arg in node.args]
        if node in left_out:
            done[node] = args[0]
        else:
            done[node] = make(node.op, node.dtype, args, node.value)
    return done[expr]
