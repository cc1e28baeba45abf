"""The canonical form of an Expr: equal meanings become one object, and no bit of a value changes.

Floats are never reassociated: a rewrite belongs here only if torch would compute the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from flexattn.mods.expr import Expr, Value, computed, const, walk
from flexattn.mods.ops import OPS, is_float, is_int

_Rule = Callable[[Expr], Expr | None]
_CPU = torch.device("cpu")

# How long a chain of "and" or "or" is at most, to be sorted.
_SORTED = 64

_SWAPPED = {"gt": "lt", "ge": "le"}
_NEGATED = {"eq": "ne", "ne": "eq"}
_NEGATED_INT = {"lt": "le", "le": "lt"}


def make(op: str, dtype: str, args: Iterable[Expr] = (), value: Value = None) -> Expr:
    """The canonical Expr for one operation on canonical operands."""
    operands = tuple(args)
    if op in _SWAPPED:
        op, operands = _SWAPPED[op], operands[::-1]
    if op in OPS and OPS[op].commutes:
        operands = tuple(sorted(operands, key=lambda arg: arg.order))
    node = Expr(op, dtype, operands, value)
    if operands and op != "load" and all(arg.op == "const" for arg in operands):
        folded = _fold(node)
        if folded is not None:
            return folded
    if op in _NEUTRAL and _changes_nothing(node):
        return operands[0]
    rule = _RULES.get(op)
    rewritten = rule(node) if rule else None
    return node if rewritten is None else rewritten


def applied(op: str, *args: Expr) -> Expr:
    """The canonical Expr for an operation whose dtype is its last operand's, or bool."""
    return make(op, "bool" if OPS[op].predicate else args[-1].dtype, args)


def clamped(x: Expr, low: float, high: float) -> Expr:
    """The number x, or the nearer of two ends where it is outside of them."""
    at_least = applied("maximum", x, const(low, x.dtype))
    return applied("minimum", at_least, const(high, x.dtype))


def _fold(node: Expr) -> Expr | None:
    """The constant that torch computes for an operation on constants, or None where it refuses."""
    shift = node.op in ("shl", "shr")
    if shift and not 0 <= int(node.args[1].value or 0) < 64:  # undefined: left to the machine
        return None
    try:
        args = [computed(arg, (), _CPU) for arg in node.args]
        value = computed(node, args, _CPU).item()
    except (RuntimeError, ArithmeticError, NotImplementedError, TypeError):
        return None
    if node.op == "cast" and not is_float(node.dtype) and not _finite(node.args[0]):
        return None
    return const(value, node.dtype)


def _finite(node: Expr) -> bool:
    return not isinstance(node.value, float) or math.isfinite(node.value)


def plug(expr: Expr, values: Mapping[int, int | float]) -> Expr:
    """The canonical form after the run-time scalars of these slots became constants."""

    def replace(node: Expr, args: Sequence[Expr]) -> Expr | None:
        if node.op == "scalar" and node.value in values:
            return const(values[node.value], node.dtype)  # type: ignore[index]
        return None

    return rebuilt(expr, replace)


def renumber(expr: Expr) -> tuple[Expr, tuple[int, ...], tuple[int, ...]]:
    """Number buffers and scalars by first appearance; with their old slots, in that order."""
    slots: dict[str, dict[Value, int]] = {"load": {}, "scalar": {}}
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        value = node.value
        if node.op in slots:
            value = slots[node.op].setdefault(value, len(slots[node.op]))
        done[node] = Expr(node.op, node.dtype, tuple(done[arg] for arg in node.args), value)
    loads, scalars = (tuple(int(old or 0) for old in slots[op]) for op in ("load", "scalar"))
    return done[expr], loads, scalars


def rebuilt(expr: Expr, replace: Callable[[Expr, Sequence[Expr]], Expr | None]) -> Expr:
    """The canonical form with other nodes in the place of some.

    replace: of a node and its operands as they are now; None for those that stay.
    """
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        args = [done[arg] for arg in node.args]
        done[node] = replace(node, args) or make(node.op, node.dtype, args, node.value)
    return done[expr]


def _is(node: Expr, number: float) -> bool:
    """True if a node is this constant, down to the sign of zero."""
    if node.op != "const" or node.value != number:
        return False
    return not is_float(node.dtype) or math.copysign(1, float(node.value or 0)) == math.copysign(
        1, number
    )


# The second operand that changes nothing.
_NEUTRAL = {
    "add": 0, "sub": 0, "mul": 1, "div": 1, "floor_div": 1, "trunc_div": 1, "shl": 0, "shr": 0,
    "xor": 0,
}  # fmt: skip


def _changes_nothing(node: Expr) -> bool:
    if is_float(node.dtype):
        if node.op == "add":  # -0.0 + 0.0 is 0.0
            return _is(node.args[1], -0.0)
        if node.op in ("floor_div", "trunc_div"):  # a quotient is rounded
            return False
    return _is(node.args[1], _NEUTRAL[node.op])


def _joined(node: Expr) -> Expr | None:
    """Joins the constants at the end of a sum or a product of integers."""
    (x, y), op = node.args, node.op
    if is_int(node.dtype) and y.op == "const" and x.op == op and x.args[1].op == "const":
        return make(op, node.dtype, (x.args[0], make(op, node.dtype, (x.args[1], y))))
    return None


def _sub(node: Expr) -> Expr | None:
    x, y = node.args
    if is_int(node.dtype):
        if x is y:
            return const(0, node.dtype)
        if y.op == "const":
            return make("add", node.dtype, (x, make("neg", node.dtype, (y,))))
        # A distance of two positions that count from the same start.
        if x.op == y.op == "sub" and x.args[1] is y.args[1]:
            return make("sub", node.dtype, (x.args[0], y.args[0]))
    return None


def _mul(node: Expr) -> Expr | None:
    y = node.args[1]
    return y if is_int(node.dtype) and _is(y, 0) else _joined(node)


def _modulo(node: Expr) -> Expr | None:
    return const(0, node.dtype) if is_int(node.dtype) and _is(node.args[1], 1) else None


def _same_twice(node: Expr) -> Expr | None:
    x, y = node.args
    return x if x is y else None


def _compare(node: Expr) -> Expr | None:
    x, y = node.args
    if x is y and not is_float(x.dtype):
        return const(node.op in ("eq", "le"), "bool")
    return None


def _not(node: Expr) -> Expr | None:
    (x,) = node.args
    if x.op == "not":
        return x.args[0]
    if x.op in _NEGATED:
        return make(_NEGATED[x.op], "bool", x.args)
    if x.op in _NEGATED_INT and not is_float(x.args[0].dtype):  # NaN < 1 and NaN >= 1 both fail
        return make(_NEGATED_INT[x.op], "bool", x.args[::-1])
    return None


def _lattice(node: Expr) -> Expr | None:
    """and, or: one sorted chain without duplicates, leaning left; a long one as it is written."""
    bottom: int | bool = node.dtype == "bool" or -1
    absorbing, neutral = (0, bottom) if node.op == "and" else (bottom, 0)
    x, y = node.args
    if x is y or _is(y, neutral):
        return x
    terms: dict[Expr, None] = {}
    seen: set[Expr] = set()
    pending = [x, y]
    while pending:
        term = pending.pop()
        if term in seen:
            continue
        seen.add(term)
        if len(seen) > 2 * _SORTED:  # sorted anew at each step, a chain of n takes n * n
            return None
        if term.op == node.op:
            pending.extend(term.args)
        elif _is(term, absorbing):
            return term
        elif not _is(term, neutral):
            terms[term] = None
    if node.dtype == "bool" and any(make("not", "bool", (term,)) in terms for term in terms):
        return const(node.op == "or", "bool")
    if not terms:
        return const(bool(neutral) if node.dtype == "bool" else neutral, node.dtype)
    chain, *rest = sorted(terms, key=lambda term: term.order)
    for term in rest:
        chain = Expr(node.op, node.dtype, (chain, term))
    return chain


def _xor(node: Expr) -> Expr | None:
    x, y = node.args
    if x is y:
        return make("cast", node.dtype, (const(0, "int64"),))
    return None


def _where(node: Expr) -> Expr | None:
    condition, x, y = node.args
    if condition.op == "const":
        return x if condition.value else y
    if x is y:
        return x
    if condition.op == "not":
        return make("where", node.dtype, (condition.args[0], y, x))
    if node.dtype == "bool" and x.op == y.op == "const":
        return condition if x.value else make("not", "bool", (condition,))
    return None


def _cast(node: Expr) -> Expr | None:
    (x,) = node.args
    if x.dtype == node.dtype:
        return x
    if x.op == "cast" and _lossless(x.args[0].dtype, x.dtype):
        return make("cast", node.dtype, x.args)
    return None


# How many bits of an integer each dtype holds without rounding.
_BITS = {
    "bool": 1, "uint8": 8, "int8": 7, "int16": 15, "int32": 31, "int64": 63,
    "bfloat16": 8, "float16": 11, "float32": 24, "float64": 53,
}  # fmt: skip


def _lossless(source: str, target: str) -> bool:
    """Every value of one dtype survives in the other."""
    if (source, target) == ("bfloat16", "float16") or (is_float(source) and not is_float(target)):
        return False
    signed = target != "uint8" or source == "bool"
    return signed and _BITS.get(source, 64) <= _BITS.get(target, 0)


_RULES: dict[str, _Rule] = {
    "add": _joined,
    "sub": _sub,
    "mul": _mul,
    "floor_mod": _modulo,
    "trunc_mod": _modulo,
    "minimum": _same_twice,
    "maximum": _same_twice,
    "eq": _compare,
    "ne": _compare,
    "lt": _compare,
    "le": _compare,
    "not": _not,
    "and": _lattice,
    "or": _lattice,
    "xor": _xor,
    "where": _where,
    "cast": _cast,
}
