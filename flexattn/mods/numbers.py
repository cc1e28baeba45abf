"""Numbers: what a kernel takes of the Python numbers that a mod captures, computed on the host.

Whatever integer follows from captured integers alone is one argument, so that a kernel neither
multiplies nor divides them. Its limits say that positions may be computed with it in 32 bits; a
value outside of them has a Mod of its own. By a number that is known to be positive a kernel
divides without a division: the host passes the multiplier and the shift of Granlund and
Montgomery, "Division by invariant integers using multiplication" (PLDI 1994), CUTLASS' FastDivmod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexattn.mods.expr import Expr, const, once, walk
from flexattn.mods.ops import OPS, Range
from flexattn.mods.simplify import make, plug, rebuilt
from flexattn.util.locks import Lru

DIVISIONS = frozenset(("floor_div", "floor_mod", "trunc_div", "trunc_mod"))
# What torch computes alike on the host and in a kernel, wrapping included.
_ON_HOST = frozenset(op.name for op in OPS.values() if op.interval is not None)
# Largest magnitudes: sums of a few such numbers and positions have 32 bits. Of what is multiplied,
# products of two smaller numbers, and of a position with one of at most 31, have 32 bits, too.
_LARGEST, _OF_FACTORS = 2**28, (31, 2**15)
_LARGEST_DIVISOR = 2**31 - 1
# How many values of a number are kept.
_VALUES = 256
_NARROW, _INT64 = "int32", (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Number:
    """One argument of a kernel, and the range that the kernel may take it to be in.

    expr: reads nothing but the scalars of a callable, by their index in its identity. limits:
    None where it may be anything that its dtype holds.
    """

    expr: Expr
    limits: Range | None = None
    # What it was, by the scalars that it reads.
    found: Lru[tuple[int | float, ...], int] = field(
        default_factory=lambda: Lru(_VALUES), compare=False
    )

    @property
    def dtype(self) -> str:
        """Of the kernel's argument."""
        return self.expr.dtype if self.limits is None else _NARROW

    def value(self, scalars: Sequence[int | float]) -> int | float | None:
        """The value now; None where it is outside of its limits or its dtype, or undefined."""
        expr = self.expr
        found = scalars[int(expr.value or 0)] if expr.op == "scalar" else self._computed(scalars)
        if found is None or (self.limits is None and expr.dtype != "int64"):
            return found
        limits = self.limits or _INT64
        return found if limits[0] <= found <= limits[1] else None

    def _computed(self, scalars: Sequence[int | float]) -> int | None:
        slots = _slots(self.expr)
        values = tuple([scalars[slot] for slot in slots])
        found = self.found.get(values)
        if found is None:
            result = plug(self.expr, dict(zip(slots, values, strict=True)))
            if result.op != "const":
                return None
            found = int(result.value or 0)
            self.found.put(values, found)
        return found


@once
def _slots(expr: Expr) -> tuple[int, ...]:
    return tuple(int(node.value or 0) for node in walk(expr) if node.op == "scalar")


def reaching_divisors(expr: Expr) -> set[int]:
    """Slots of the captured integers from which a divisor or modulus is computed."""
    found: set[int] = set()
    for node in walk(expr):
        if node.op in DIVISIONS and node.dtype == "int64":
            found.update(_slots(node.args[1]))
    return found


def derived(
    expr: Expr, scalars: Sequence[int | float], earlier: Sequence[Number]
) -> tuple[Expr, tuple[Number, ...]]:
    """An expression of captured scalars as one of a kernel's numbers, by slot.

    scalars: their present values. earlier: numbers of a Mod of the same expression that these
    values did not fit: limits only grow, so that a number has few Mods however it changes.
    """
    roots = _roots(expr)
    values = {root: Number(root).value(scalars) for root in roots}
    if None in values.values():  # a division by zero: left to the machine, as it stands
        roots = [node for node in walk(expr) if node.op == "scalar"]
        return _replaced(expr, [Number(root) for root in roots])
    nodes = list(walk(expr))
    below = {n.args[1] for n in nodes if n.op in DIVISIONS and n.dtype == "int64"}
    products = [
        n for n in nodes
        if n.op == "mul" and n.dtype == "int64" and n not in values and values.keys() & {*n.args}
    ]  # fmt: skip
    multiplied = set(walk(*products))
    known = {number.expr: number.limits for number in earlier}
    found = []
    for root in roots:
        limits = None
        if root.dtype == "int64":
            steps = (*_OF_FACTORS, _LARGEST) if root in multiplied else (_LARGEST,)
            limits = _limits(int(values[root] or 0), steps, divides=root in below)
        before = known.get(root, limits)
        if limits is not None and before is not None:
            limits = min(limits[0], before[0]), max(limits[1], before[1])
        found.append(Number(root, limits if before else None))
    return _replaced(expr, found)


def number_of(node: Expr) -> tuple[int, Range] | None:
    """(slot, limits) of an argument that is known to lie between its limits; None for all else.

    Such a number is a scalar of 32 bits, which no callable captures, behind a clamp that says
    what it can be and changes nothing.
    """
    match node:
        case Expr(
            op="minimum",
            args=(
                Expr(op="maximum", args=(read, Expr(op="const", value=int(low)))),
                Expr(op="const", value=int(high)),
            ),
        ):
            match read:
                case Expr(op="cast", args=(Expr(op="scalar", dtype="int32", value=int(slot)),)):
                    return slot, (low, high)
    return None


def divisor_of(node: Expr) -> int | None:
    """The slot of the positive number of 32 bits that an operation divides by, if it does."""
    if node.op not in DIVISIONS or node.dtype != "int64":
        return None
    found = number_of(node.args[1])
    return found[0] if found is not None and found[1][0] > 0 else None


@once
def divisors(expr: Expr) -> tuple[int, ...]:
    """Slots of the numbers that `divisor_of` finds in an expression, in order."""
    found = {divisor_of(node) for node in walk(expr)}
    return tuple(sorted(slot for slot in found if slot is not None))


def invariant(divisor: int) -> tuple[int, int]:
    """(multiplier, shift): n // divisor is ((2 n * multiplier) >> 32) >> shift for n below 2**31.

    With 2**(shift - 1) < divisor <= 2**shift and multiplier = ceil(2**(31 + shift) / divisor), the
    multiplier times the divisor exceeds that power by e < divisor <= 2**shift. So n * multiplier /
    2**(31 + shift) exceeds n / divisor by n e / (divisor 2**(31 + shift)) < 1 / divisor, which
    takes no quotient to the next integer. The divisor is from 1 to 2**31 - 1, and the multiplier
    from 2**31 to 2**32 - 1.
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << (31 + shift)) // divisor), shift


def _roots(expr: Expr) -> list[Expr]:
    """The largest parts that the host computes, in order, and every other scalar."""
    nodes = list(walk(expr))
    reading: dict[Expr, bool] = {}  # of what the host can compute, whether it reads a scalar
    for node in nodes:
        if node.op in ("const", "scalar"):
            reading[node] = node.op == "scalar"
        elif node.op in _ON_HOST and node.dtype == "int64" and _whole(node, reading):
            reading[node] = any(reading[arg] for arg in node.args)
    inner = {arg for node in nodes if node in reading for arg in node.args}
    outer = {arg for node in nodes if node not in reading for arg in node.args} | {expr}
    return [n for n in nodes if reading.get(n, False) and (n in outer or n not in inner)]


def _whole(node: Expr, known: Mapping[Expr, bool]) -> bool:
    return all(arg in known and arg.dtype == "int64" for arg in node.args)


def _limits(value: int, steps: Sequence[int], divides: bool) -> Range | None:
    positive = divides and value > 0
    for step in (*steps, _LARGEST_DIVISOR) if positive else steps:
        if abs(value) <= step:
            return (1 if positive else -step), step
    return None


def _replaced(expr: Expr, numbers: Sequence[Number]) -> tuple[Expr, tuple[Number, ...]]:
    arguments = {number.expr: _argument(slot, number) for slot, number in enumerate(numbers)}
    return rebuilt(expr, lambda node, _: arguments.get(node)), tuple(numbers)


def _argument(slot: int, number: Number) -> Expr:
    """A number as a kernel reads it, behind a clamp to its limits where it has any."""
    read, dtype = Expr("scalar", number.dtype, (), slot), number.expr.dtype
    if number.limits is None:
        return read
    low, high = (const(limit, dtype) for limit in number.limits)
    at_least = make("maximum", dtype, (make("cast", dtype, (read,)), low))
    return make("minimum", dtype, (at_least, high))
