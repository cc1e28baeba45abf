"""derivatives(): of a score_mod with respect to the score and to what it loads, as expressions.

Stops are where a score_mod keeps something from autograd. Both are the identity. Through "detach"
no gradient goes; what goes through "own_gradient", where an autograd Function or a hook decided
it, no expression says. Kernels of a forward have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from typing import Any

from flexattn.errors import UnsupportedError
from flexattn.mods.expr import Expr, Mod, const, once, walk
from flexattn.mods.ops import DETACH, OPS, OWN_GRADIENT, is_float
from flexattn.mods.simplify import make, rebuilt, renumber
from flexattn.mods.site import Bound, interned

_FLOAT = "float32"
_POSITIONS = {"b", "h", "q_idx", "kv_idx"}
# What a number of each dtype is computed in: a derivative in 16 bits would be rounded once and
# multiplied into every score.
_WIDE = {"float64": "float64"}


@dataclass(frozen=True, slots=True)
class LoadDerivative:
    """The derivative of a score_mod with respect to one of its loads.

    load: the node, whose slot says which tensor it reads, and whose operands say where.
    """

    load: Expr
    factor: Expr


@dataclass(frozen=True, slots=True)
class Derivatives:
    """The factors that turn the gradient of a modified score into others.

    score: of the score; None where the score is not read. loads: of loads, in walk's order.
    All are float32 (float64 where the mod computes in it), and share the mod's own nodes.
    """

    score: Expr | None
    loads: tuple[LoadDerivative, ...]

    def summed(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """The slots in which an element may be read for several scores.

        What is read once, by all four positions as they are, is only written.
        """
        return tuple(slot for slot in slots if not self._once(slot))

    def _once(self, slot: int) -> bool:
        loads = [each.load for each in self.loads if each.load.value == slot]
        read = [{arg.value for arg in load.args if arg.op == "var"} for load in loads]
        return not loads or read == [_POSITIONS]

    @property
    def roots(self) -> tuple[Expr, ...]:
        """All of them."""
        score = () if self.score is None else (self.score,)
        return (*score, *(each.factor for each in self.loads))


def loaded_floats(mod: Mod) -> tuple[int, ...]:
    """The slots of the captured tensors that may have a gradient: those of floating point."""
    return tuple(slot for slot, buffer in enumerate(mod.buffers) if is_float(buffer.dtype))


@once
def derivatives(mod: Mod, slots: tuple[int, ...] = ()) -> Derivatives:
    """The derivatives of a score_mod with respect to the score, and to its loads of these slots.

    By torch's conventions where it bends; a cast to an integer, a condition and a detached value
    end a path.
    Raises UnsupportedError, which names the operation, where torch has no derivative or Triton
    cannot express it. Method: the chain rule from the result to its operands, once over the graph.
    """
    nodes = list(walk(mod.expr))
    wanted = {node for node in nodes if _is_wanted(node, slots)}
    reached = _reached(nodes, wanted)
    grads = {mod.expr: const(1.0, _wide(mod.expr.dtype))}
    for node in reversed(nodes):
        if node not in grads or node not in reached:
            continue
        for place, operand in enumerate(node.args):
            if operand in reached and is_float(operand.dtype) and is_float(node.dtype):
                part = _part(node, place, grads[node])
                grads[operand] = (
                    make("add", part.dtype, (grads[operand], part)) if operand in grads else part
                )
    tidy = _Tidy(nodes)
    factors = {node: tidy(grads[node]) for node in nodes if node in wanted and node in grads}
    loads = [
        LoadDerivative(n, f) for n, f in factors.items() if n.op == "load" and not _is(f, 0.0)
    ]
    score = [factor for node, factor in factors.items() if node.op == "var"]
    return Derivatives(score[0] if score and not _is(score[0], 0.0) else None, tuple(loads))


def _is_wanted(node: Expr, slots: tuple[int, ...]) -> bool:
    if node.op == "load":
        return node.value in slots and is_float(node.dtype)
    return node.op == "var" and node.value == "score"


def _reached(nodes: Iterable[Expr], wanted: set[Expr]) -> set[Expr]:
    """The nodes, in walk's order, whose value moves with a wanted one, by floats alone."""
    found: set[Expr] = set()
    for node in nodes:
        if node.op == DETACH:
            continue
        if node in wanted or (is_float(node.dtype) and any(arg in found for arg in node.args)):
            found.add(node)
    return found


def _part(node: Expr, place: int, grad: Expr) -> Expr:
    """The part of an operand's gradient that comes from one node, in the operand's wide dtype."""
    operand = node.args[place]
    if node.op == "cast":
        return make("cast", _wide(operand.dtype), (grad,))
    # The same operation on the same numbers, of which none is rounded to 16 bits on the way back.
    wide = tuple(
        make("cast", _wide(arg.dtype), (arg,)) if is_float(arg.dtype) else arg for arg in node.args
    )
    try:
        return gradient(Expr(node.op, grad.dtype, wide, node.value), place, grad)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"score_mod's derivative goes through {node.op}, of which there is none: {error.rule}",
            "each operation between the score, or a tensor that requires grad, and the result "
            "has a derivative",
            "call it under torch.no_grad(), or write it with other operations",
        ) from None


def _wide(dtype: str) -> str:
    return _WIDE.get(dtype, _FLOAT)


def _is(expr: Expr, number: float) -> bool:
    return expr.op == "const" and expr.value == number


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A number times an expression; None stands for 1."""

    number: float
    core: Expr | None


class _Tidy:
    """The algebra of real numbers on what the chain rule leaves, numbers gathered in front.

    The mod's own nodes stay as they are: a kernel computes them already. What a gradient of 0 is
    multiplied by is left out, so a product with an infinity there is 0.
    """

    def __init__(self, own: Iterable[Expr]) -> None:
        self.own = frozenset(own)
        self.done: dict[Expr, _Scaled] = {}

    def __call__(self, expr: Expr) -> Expr:
        for node in walk(expr, enter=lambda node: node not in self.done):
            if node not in self.done:
                self.done[node] = self._node(node)
        return _whole(self.done[expr], expr.dtype)

    def _node(self, node: Expr) -> _Scaled:
        if node.op == "const" and is_float(node.dtype):
            return _Scaled(float(node.value or 0.0), None)
        if node in self.own or not is_float(node.dtype) or not node.args:
            return _Scaled(1.0, node)
        args = [self.done[arg] for arg in node.args]
        if node.op in ("neg", "mul", "div", "add", "sub", "where"):
            scaled: _Scaled = getattr(self, f"_{node.op}")(node.dtype, *args)
            return scaled
        whole = [_whole(x, arg.dtype) for x, arg in zip(args, node.args, strict=True)]
        return _Scaled(1.0, make(node.op, node.dtype, whole, node.value))

    def _neg(self, dtype: str, x: _Scaled) -> _Scaled:
        return _Scaled(-x.number, x.core)

    def _mul(self, dtype: str, x: _Scaled, y: _Scaled) -> _Scaled:
        number = x.number * y.number
        if number == 0.0:
            return _Scaled(0.0, None)
        if x.core is None or y.core is None:
            return _Scaled(number, x.core or y.core)
        for one, other in ((x.core, y.core), (y.core, x.core)):
            if self._halved(one):
                return _Scaled(number, self._inside("mul", one, other))
        return _Scaled(number, make("mul", dtype, (x.core, y.core)))

    def _div(self, dtype: str, x: _Scaled, y: _Scaled) -> _Scaled:
        if y.number == 0.0:
            return _Scaled(1.0, make("div", dtype, (_whole(x, dtype), _whole(y, dtype))))
        if x.number == 0.0:
            return _Scaled(0.0, None)
        number = x.number / y.number
        if y.core is None:
            return _Scaled(number, x.core)
        if x.core is not None and self._halved(x.core):
            return _Scaled(number, self._inside("div", x.core, y.core))
        return _Scaled(number, make("div", dtype, (x.core or const(1.0, dtype), y.core)))

    def _halved(self, expr: Expr) -> bool:
        """True if it is a derivative of `where`, which is 0 on one side."""
        return (
            expr.op == "where"
            and expr not in self.own
            and any(_is(arg, 0.0) for arg in expr.args[1:])
        )

    def _inside(self, op: str, chosen: Expr, other: Expr) -> Expr:
        """where(c, a, 0) * y as where(c, a * y, 0): 0 also where y is no number."""
        condition, *sides = chosen.args
        found = []
        for side in sides:
            if _is(side, 1.0) and op == "mul":
                found.append(other)
            else:
                found.append(side if _is(side, 0.0) else make(op, chosen.dtype, (side, other)))
        return make("where", chosen.dtype, (condition, *found))

    def _add(self, dtype: str, x: _Scaled, y: _Scaled) -> _Scaled:
        if x.core is y.core:
            return _Scaled(x.number + y.number, x.core)
        if x.number == 0.0 or y.number == 0.0:
            return y if x.number == 0.0 else x
        return _Scaled(1.0, make("add", dtype, (_whole(x, dtype), _whole(y, dtype))))

    def _sub(self, dtype: str, x: _Scaled, y: _Scaled) -> _Scaled:
        if x.core is y.core or x.number == 0.0 or y.number == 0.0:
            return self._add(dtype, x, _Scaled(-y.number, y.core))
        return _Scaled(1.0, make("sub", dtype, (_whole(x, dtype), _whole(y, dtype))))

    def _where(self, dtype: str, condition: _Scaled, x: _Scaled, y: _Scaled) -> _Scaled:
        assert condition.core is not None
        number = 1.0
        if x.number == 0.0 or y.number == 0.0:  # the number of the other side comes in front
            number = y.number if x.number == 0.0 else x.number
            x, y = (s if s.number == 0.0 else _Scaled(1.0, s.core) for s in (x, y))
        if number == 0.0:
            return _Scaled(0.0, None)
        sides = (_whole(x, dtype), _whole(y, dtype))
        chosen = make("where", dtype, (condition.core, *sides))
        return _Scaled(number, None) if _is(chosen, 1.0) else _Scaled(number, chosen)


def _whole(x: _Scaled, dtype: str) -> Expr:
    if x.number == 0.0 or x.core is None:
        return const(_rounded(0.0 if x.number == 0.0 else x.number, dtype), dtype)
    if x.number == 1.0:
        return x.core
    if x.number == -1.0:
        return make("neg", dtype, (x.core,))
    return make("mul", dtype, (x.core, const(_rounded(x.number, dtype), dtype)))


def _rounded(number: float, dtype: str) -> float:
    """A number as a dtype holds it."""
    return number if dtype == "float64" else c_float(number).value


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


_STOPS = (DETACH, OWN_GRADIENT)


def without_idle_stops(expr: Expr, kind: str) -> Expr:
    """The canonical form without stops that stop no gradient: a mask has none at all.

    Gradients go from the result, by floats alone, to the score and to what is loaded.
    """
    nodes = list(walk(expr))
    stops = [node for node in nodes if node.op in _STOPS]
    if kind != "score" or not stops:
        return _without(expr, stops)
    # What is behind a detached value needs no other stop.
    slots = tuple(int(node.value or 0) for node in nodes if node.op == "load")
    moving = _reached(nodes, {node for node in nodes if _is_wanted(node, slots)})
    asked = {expr}
    for node in reversed(nodes):
        if node in asked and is_float(node.dtype):
            asked.update(arg for arg in node.args if is_float(arg.dtype))
    return _without(expr, [x for x in stops if x not in asked or x.args[0] not in moving])


def without_stops(bound: Bound) -> Bound:
    """A mod as a forward computes it."""
    forward = _forward(bound.mod)
    if forward is None:
        return bound
    mod, tensors, scalars = forward
    return Bound(
        mod, tuple(bound.tensors[i] for i in tensors), tuple(bound.scalars[i] for i in scalars)
    )


@once
def has_own_gradient(mod: Mod) -> bool:
    """True if a gradient of a score_mod is not that of its expression."""
    return any(node.op == OWN_GRADIENT for node in walk(mod.expr))


@once
def _forward(mod: Mod) -> tuple[Mod, tuple[int, ...], tuple[int, ...]] | None:
    """The Mod without stops, and which slots of the other it has; None where it has no stop."""
    stops = [node for node in walk(mod.expr) if node.op in _STOPS]
    if not stops:
        return None
    expr, tensors, scalars = renumber(_without(mod.expr, stops))
    buffers = tuple(mod.buffers[i] for i in tensors)
    dtypes = tuple(mod.scalars[i] for i in scalars)
    return interned(mod.kind, expr, buffers, dtypes), tensors, scalars


def _without(expr: Expr, stops: Iterable[Expr]) -> Expr:
    left_out = set(stops)
    return rebuilt(expr, lambda node, args: args[0] if node in left_out else None)
