"""Numbers: what a kernel takes of the numbers that the host computes of what a mod captures.

The limits of one say that positions may be computed with it in 32 bits; a value outside of them
has a Mod of its own. By a number that is known to be positive a kernel divides without a division:
the host passes the multiplier and the shift of Granlund and Montgomery, "Division by invariant
integers using multiplication" (PLDI 1994), CUTLASS' FastDivmod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.mods.expr import Expr, const, once, walk
from flexattn.mods.ops import Range
from flexattn.mods.simplify import make, rebuilt

DIVISIONS = frozenset(("floor_div", "floor_mod", "trunc_div", "trunc_mod"))
# Largest magnitudes: sums of a few such numbers and positions have 32 bits. Of what is multiplied,
# products of two smaller numbers, and of a position with one of at most 31, have 32 bits, too.
_LARGEST, _OF_FACTORS = 2**28, (31, 2**15)
_LARGEST_DIVISOR = 2**31 - 1
_NARROW, _INT64 = "int32", (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Number:
    """One argument of a kernel, and the range that the kernel may take it to be in.

    slot: of the host's numbers. found: its dtype as the host has it. limits: None where it may be
    anything that its dtype holds.
    """

    slot: int
    found: str
    limits: Range | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the kernel's argument."""
        return self.found if self.limits is None else _NARROW

    def value(self, scalars: Sequence[int | float]) -> int | float | None:
        """The value now; None where it is outside of its limits or its dtype."""
        value = scalars[self.slot]
        if self.limits is None and self.found != "int64":
            return value
        low, high = self.limits or _INT64
        return value if low <= value <= high else None


def reaching_divisors(expr: Expr) -> set[int]:
    """Slots of the captured integers from which a divisor or modulus is computed."""
    below = (n.args[1] for n in walk(expr) if n.op in DIVISIONS and n.dtype == "int64")
    return {int(n.value or 0) for n in walk(*below) if n.op == "scalar"}


def derived(
    expr: Expr,
    scalars: Sequence[int | float],
    earlier: Sequence[Number],
    places: Sequence[int] = (),
) -> tuple[Expr, tuple[Number, ...]]:
    """An expression of the host's numbers as one of a kernel's, by slot.

    scalars: their present values. earlier: numbers of a Mod of the same expression that these
    values did not fit: limits only grow, so that a number has few Mods however it changes. places:
    of the expression's slots among the scalars, where these are others.
    """
    nodes = list(walk(expr))
    read = [node for node in nodes if node.op == "scalar"]
    below = {n.args[1] for n in nodes if n.op in DIVISIONS and n.dtype == "int64"}
    products = [n for n in nodes if n.op == "mul" and n.dtype == "int64" and {*read} & {*n.args}]
    multiplied = set(walk(*products))
    known = {number.slot: number.limits for number in earlier}
    numbers: dict[Expr, Number] = {}
    for node in read:
        slot, limits = int(node.value or 0), None
        slot = places[slot] if places else slot
        if node.dtype == "int64":
            steps = (*_OF_FACTORS, _LARGEST) if node in multiplied else (_LARGEST,)
            limits = _limits(int(scalars[slot]), steps, divides=node in below)
        before = known.get(slot, limits)
        if limits is not None and before is not None:
            limits = min(limits[0], before[0]), max(limits[1], before[1])
        numbers[node] = Number(slot, node.dtype, limits if before else None)
    arguments = {node: _argument(slot, each) for slot, (node, each) in enumerate(numbers.items())}
    return rebuilt(expr, lambda node, _: arguments.get(node)), tuple(numbers.values())


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


def _limits(value: int, steps: Sequence[int], divides: bool) -> Range | None:
    positive = divides and value > 0
    for step in (*steps, _LARGEST_DIVISOR) if positive else steps:
        if abs(value) <= step:
            return (1 if positive else -step), step
    return None


def _argument(slot: int, number: Number) -> Expr:
    """A number as a kernel reads it, behind a clamp to its limits where it has any."""
    read, dtype = Expr("scalar", number.dtype, (), slot), number.found
    if number.limits is None:
        return read
    low, high = (const(limit, dtype) for limit in number.limits)
    at_least = make("maximum", dtype, (make("cast", dtype, (read,)), low))
    return make("minimum", dtype, (at_least, high))
