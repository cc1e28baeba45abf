"""Values of a kernel's mods, where they lie, and the instructions that compute on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from flexattn.errors import UnsupportedError
from flexattn.mods.ops import Range

# How the engines compute the operations of an Expr. One instruction with two operands:
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "pow": "power",
    "minimum": "minimum", "maximum": "maximum", "clamp_min": "maximum", "clamp_max": "minimum",
    "and": "logical_and", "or": "logical_or", "xor": "logical_xor",
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip
# One instruction with an operand and a number:
NUMBERED = {
    "neg": ("multiply", "-1.0"), "relu": ("maximum", "0.0"), "sqrt": ("power", "0.5"),
    "rsqrt": ("power", "-0.5"), "not": ("equal", "0.0"),
}  # fmt: skip
_LN2 = math.log(2.0)
# outside * function(inside * x) by the Scalar Engine: function, inside, outside.
ACTIVATIONS = {
    **{name: (name, 1.0, 1.0) for name in ("exp", "log", "tanh", "sigmoid", "erf", "sign")},
    "exp2": ("exp", _LN2, 1.0),
    "log2": ("log", 1.0, 1.0 / _LN2),
}
_STEPS = "div floor_div floor_mod abs reciprocal isnan where floor ceil round"
# All that an engine computes on a tile; the rest is a table, or refused.
ON_CHIP = frozenset((*BINARY, *NUMBERED, *ACTIVATIONS, *_STEPS.split()))
_COMMUTE = frozenset(
    "add multiply maximum minimum equal not_equal logical_and logical_or logical_xor".split()
)


@dataclass(frozen=True, slots=True)
class NkiValue:
    """A printed operand.

    place: a number that Python knows, a column of one float32 a row, or a tile. text: how the
    kernel writes it. slot: of a tile or column in its pool, -1 for what the template owns.
    """

    place: Literal["static", "column", "tile"]
    text: str
    pool: str = ""
    slot: int = -1


@dataclass
class Pools:
    """Tiles and columns by dtype, each handed out again when its value is no longer needed.

    Tiles are [rows, keys], columns [rows, 1]. used: how many of each pool the kernel allocates.
    """

    free: dict[str, list[int]] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    def take(self, pool: str) -> NkiValue:
        """A place in a pool: "tile_f32", _bf16, _f16, _i32 or _u8, "column" or "column_i32"."""
        spare = self.free.setdefault(pool, [])
        if spare:
            slot = spare.pop()
        else:
            slot = self.used.get(pool, 0)
            self.used[pool] = slot + 1
        if pool.startswith("column"):
            name = pool.replace("column", "columns")
            return NkiValue("column", f"{name}[:rows, {slot}:{slot + 1}]", pool, slot)
        return NkiValue("tile", f"{pool}{self.tile(str(slot))}", pool, slot)

    def tile(self, slot: str = "") -> str:
        """The index of a tile, of a slot or, without one, of memory that holds one tile."""
        slot = f", {slot}" if slot else ""
        return f"[:rows{slot}, :cols]"

    def first(self, tile: NkiValue) -> str:
        """The first column of a tile."""
        return f"{tile.pool}[:rows, {tile.slot}, 0:1]"

    def give(self, value: NkiValue) -> None:
        """The value is no longer needed. Columns stay: they are made once, before all tiles."""
        if value.slot >= 0 and value.place == "tile":
            self.free[value.pool].append(value.slot)


ZERO = NkiValue("static", "0.0")


class NkiEmitter:
    """Appends instructions to `body`, or to `hoisted` where no operand is a tile."""

    def __init__(self, target: str, pools: Pools) -> None:
        self.target, self.pools = target, pools
        self.hoisted: list[str] = []
        self.body: list[str] = []

    def lines(self, *values: NkiValue) -> list[str]:
        """The lines to which an operation on these values is added."""
        return self.body if any(value.place == "tile" for value in values) else self.hoisted

    def result(self, *args: NkiValue) -> NkiValue:
        """A float32 place for the result of an operation on these values."""
        tile = any(arg.place == "tile" for arg in args)
        return self.pools.take("tile_f32" if tile else "column")

    def scalar(
        self, result: NkiValue, data: NkiValue, op: str, value: NkiValue, reverse: bool
    ) -> None:
        """result = data op value, or the other way round; value is a number or a column."""
        order = ", reverse0=True" if reverse else ""
        self.lines(result).append(
            f"nisa.tensor_scalar(dst={result.text}, data={data.text}, op0=nl.{op}, "
            f"operand0={value.text}{order})"
        )

    def tensors(self, result: NkiValue, one: NkiValue, other: NkiValue, op: str) -> None:
        """result = one op other, on values of one shape."""
        self.lines(result).append(
            f"nisa.tensor_tensor(dst={result.text}, data1={one.text}, data2={other.text}, "
            f"op=nl.{op})"
        )

    def copy(self, result: NkiValue, source: NkiValue) -> None:
        """result = source, converted to the result's dtype."""
        self.lines(result).append(
            f"nisa.tensor_copy(dst={result.text}, src={source.text}, engine=nisa.engine.vector)"
        )

    def fill(self, result: NkiValue, value: NkiValue) -> None:
        """Copy a value of any place into a tile or column; into a uint8 one, a truth value."""
        truth = result.pool == "tile_u8"
        lines = self.lines(result)
        if value.place == "static":
            text = value.text if truth else f"{value.text} * 1.0"
            lines.append(f"nisa.memset(dst={result.text}, value={text})")
        elif value.place == "column" and result.place == "tile":
            lines.append(f"nisa.memset(dst={result.text}, value={'0' if truth else '0.0'})")
            self.scalar(result, result, "add", value, False)
        else:
            self.copy(result, value)

    def binary(self, op: str, mirrored: str, one: NkiValue, other: NkiValue) -> NkiValue:
        """mirrored: what gives the same with the operands swapped, or the operator itself."""
        result = self.result(one, other)
        if one.place == other.place and one.place != "static":
            self.tensors(result, one, other, op)
            return result
        order = ("static", "column", "tile")
        swap = order.index(one.place) < order.index(other.place)
        data, value = (other, one) if swap else (one, other)
        if data.place == "static":
            self.fill(result, data)
            data = result
        commutes = swap and (mirrored != op or op in _COMMUTE)
        self.scalar(result, data, mirrored if commutes else op, value, swap and not commutes)
        return result

    def unary(self, op: str, arg: NkiValue) -> NkiValue:
        """An operation with one operand: with a number, abs, isnan or rounding."""
        result = self.result(arg)
        if op in NUMBERED:
            name, number = NUMBERED[op]
            self.scalar(result, arg, name, NkiValue("static", number), False)
        elif op == "isnan":
            self.tensors(result, arg, arg, "not_equal")
        elif op == "abs":
            self.lines(arg).append(
                f"nisa.scalar_tensor_tensor(dst={result.text}, data={arg.text}, op0=nl.multiply, "
                f"operand0=-1.0, op1=nl.maximum, operand1={arg.text})"
            )
        else:
            self._round(op, result, arg)
        return result

    def activation(self, op: str, arg: NkiValue) -> NkiValue:
        """An operation of ACTIVATIONS."""
        function, inside, outside = ACTIVATIONS[op]
        result = self.result(arg)
        self.lines(arg).append(
            f"nisa.activation(dst={result.text}, op=nl.{function}, data={arg.text}, "
            f"scale={inside!r})"
        )
        if outside != 1.0:
            factor = NkiValue("static", repr(outside))
            self.scalar(result, result, "multiply", factor, False)
        return result

    def inverse(self, arg: NkiValue) -> NkiValue:
        """1 / arg, to the Vector Engine's precision."""
        if arg.place == "static":
            return NkiValue("static", f"1.0 / ({arg.text})")
        result = self.result(arg)
        self.lines(arg).append(f"nisa.reciprocal(dst={result.text}, data={arg.text})")
        return result

    def floored(
        self, op: str, arg: NkiValue, divisor: NkiValue | None, reach: Range | None
    ) -> NkiValue:
        """x // c by a product that lands between integers, rounded; x % c by what is left.

        divisor: a positive constant, None where it is none. reach: what arg can be.
        """
        if divisor is None:
            raise UnsupportedError(
                f"{op} by what is no positive constant",
                f"{self.target} has no division; by a constant it is a product",
                "divide by a Python integer above 0 that stays the same",
            )
        if reach is None or max(abs(reach[0]), abs(reach[1])) >= 2**21:
            raise UnsupportedError(
                f"{op} of a number that may reach {reach}",
                f"it is exact below 2^21 on {self.target}",
            )
        result, moved = self.result(arg), self.result(arg)
        # x / c - 1/2 + 1/(2 c) is at least 1/(2 c) from a tie, and rounds to floor(x / c).
        self.lines(arg).append(
            f"nisa.tensor_scalar(dst={moved.text}, data={arg.text}, op0=nl.multiply, "
            f"operand0=1.0 / ({divisor.text}), op1=nl.add, "
            f"operand1=0.5 / ({divisor.text}) - 0.5)"
        )
        self._round("round", result, moved)
        self.pools.give(moved)
        if op == "floor_mod":
            self.lines(arg).append(
                f"nisa.scalar_tensor_tensor(dst={result.text}, data={result.text}, "
                f"op0=nl.multiply, operand0=({divisor.text}) * -1.0, op1=nl.add, "
                f"operand1={arg.text})"
            )
        return result

    def where(self, chosen: NkiValue, yes: NkiValue, no: NkiValue) -> NkiValue:
        """A selection, which NaN in what is not chosen does not reach."""
        result = self.result(chosen, yes, no)
        self.fill(result, no)
        predicate = taken = self.pools.take("tile_u8")
        if result.place == "column":
            predicate = NkiValue("column", self.pools.first(taken), taken.pool, taken.slot)
        self.fill(predicate, chosen)
        source, spare = yes, None
        if yes.place != "static" and (yes.place, yes.pool) != (result.place, result.pool):
            source = spare = self.pools.take(result.pool)
            self.fill(spare, yes)
        self.lines(result).append(
            f"nisa.tensor_copy_predicated(dst={result.text}, src={source.text}, "
            f"predicate={predicate.text})"
        )
        self.pools.give(taken)
        if spare is not None:
            self.pools.give(spare)
        return result

    def _round(self, op: str, result: NkiValue, arg: NkiValue) -> None:
        """Through int32, which rounds to the nearest; floor and ceil then step back."""
        whole = self.pools.take("tile_i32" if arg.place == "tile" else "column_i32")
        self.copy(whole, arg)
        self.copy(result, whole)
        self.pools.give(whole)
        if op == "round":
            return
        over = self.result(arg)
        compare, step = ("greater", "subtract") if op == "floor" else ("less", "add")
        self.tensors(over, result, arg, compare)
        self.tensors(result, result, over, step)
        self.pools.give(over)
