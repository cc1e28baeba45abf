"""Writes random expressions of torch over positions, captured tensors and captured numbers.

What jumps (comparisons, `//`, `%`, casts to integers) is computed from integers, or from floats as
they are loaded: where two precisions may round a value to different sides of a jump there is no
one right answer. Everything else is smooth, and bounded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.random_mods.terms import (
    DISTANCE,
    FLOATS,
    INTEGERS,
    VARIABLES,
    WHOLE,
    Term,
    bits_of,
    constant,
    corners,
    integral,
)

# A dimension is as long as the batch, the heads, the rows or the keys, or a number.
Dim = str | int
POSITIONS = {"B": "b", "H": "h", "L": "q_idx", "S": "kv_idx"}
SHAPES: tuple[tuple[Dim, ...], ...] = (
    ("S",), ("S",), ("S",), ("L",), ("H",), ("H",), ("B",), (17,), (64,), (33,),
    ("H", 65), ("H", 128), (16, 16), ("H", "S"), ("B", "S"), ("B", "L"), (3, "S"), ("B", "H"),
)  # fmt: skip
DIVISORS = (2, 3, 4, 5, 7, 8, 12, 16, 24, 64, 100, 128, 1000, -3, -8)


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured tensor with values from low to high, or a number where `dims` is None."""

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None
    low: float
    high: float

    def __str__(self) -> str:
        if self.dims is None:
            return f"{self.name} = {self.low!r}"
        shape = ", ".join(map(str, self.dims))
        return f"{self.name}: {self.dtype}[{shape}] of {self.low:g}..{self.high:g}"


class Writer:
    """The body of one mod; `room`: captures that it may have."""

    def __init__(self, draw: random.Random, room: int) -> None:
        self.draw, self.room = draw, room
        self.captures: list[Capture] = []
        self.lines: list[str] = []
        self.named: list[Term] = []

    def kept(self, term: Term) -> Term:
        """The term, which now and then gets a name and is used again."""
        if len(term.text) < 12 or self.draw.random() > 0.2:
            return term
        named = Term(f"x{len(self.named)}", term.dtype, term.low, term.high)
        self.lines.append(f"{named.text} = {term.text}")
        self.named.append(named)
        return named

    def one_of(self, weights: dict[Callable[[int], Term], int], depth: int) -> Term:
        (make,) = self.draw.choices(list(weights), list(weights.values()))
        return make(depth - 1)

    # Captures

    def capture(
        self, dtype: str, dims: tuple[Dim, ...] | None, low: float, high: float
    ) -> Capture:
        name = f"{'n' if dims is None else 't'}{len(self.captures)}"
        self.captures.append(Capture(name, dtype, dims, low, high))
        return self.captures[-1]

    def number(self, value: float) -> Term:
        """A constant, or a captured number."""
        if len(self.captures) < self.room and self.draw.random() < 0.2:
            return Term(self.capture("", None, value, value).name, "", value, value)
        return constant(value)

    def loaded(
        self, dtypes: tuple[str, ...], limits: tuple[float, float], depth: int, fresh: float = 0.6
    ) -> Term | None:
        """An element of a captured tensor within limits; None where there is no room for one."""
        low, high = limits
        known = [
            each
            for each in self.captures
            if each.dims and each.dtype in dtypes and low <= each.low and each.high <= high
        ]
        if len(self.captures) < self.room and (not known or self.draw.random() < fresh):
            dtype = self.draw.choice(dtypes)
            if dtype == "uint8":
                low = max(low, 0)
            chosen = self.capture(dtype, self.draw.choice(SHAPES), low, high)
        elif known:
            chosen = self.draw.choice(known)
        else:
            return None
        index = ", ".join(self.position(dim, depth) for dim in chosen.dims or ())
        return Term(f"{chosen.name}[{index}]", chosen.dtype, chosen.low, chosen.high)

    def position(self, dim: Dim, depth: int) -> str:
        """An index into a dimension, always in range."""
        if isinstance(dim, str):
            near = self.draw.random()
            if dim in "LS" and near < 0.08:
                return "torch.minimum(q_idx, kv_idx)"
            if dim in "LS" and near < 0.16:
                return f"{POSITIONS[dim]} // {self.draw.choice((2, 3, 16))}"
            return POSITIONS[dim]
        if depth > 0 and self.draw.random() < 0.5:
            inner = self.loaded(INTEGERS, (0, dim - 1), depth - 1)
            if inner is not None:
                return self.as_index(inner)
        if dim % 2 and self.draw.random() < 0.6:
            half = dim // 2
            return f"{DISTANCE.text}.clamp({-half}, {half}) + {half}"
        found = self.integer(depth - 1)
        if self.draw.random() < 0.3:
            return self.as_index(self.clamped(found, 0, dim - 1))
        if self.draw.random() < 0.1:
            return f"-1 - {integral('({} % {})', found, constant(dim), 0, dim - 1).text}"
        return self.as_index(integral("({} % {})", found, constant(dim), 0, dim - 1))

    def as_index(self, term: Term) -> str:
        """torch takes an index of eight bits for a mask, or not at all."""
        return (term if term.dtype in ("int64", "int32") else term.cast("int64")).text

    # Integers

    def integer(self, depth: int) -> Term:
        if depth <= 0:
            return self.place(depth)
        found = self.one_of(
            {
                self.place: 3, self.entry: 3, self.sum: 3, self.divided: 4, self.bits: 3,
                self.shifted: 2, self.between: 2, self.narrowed: 1, self.choice: 1, self.flag: 1,
                self.floored: 1, self.hashed: 1,
            },
            depth,
        )  # fmt: skip
        if found.size > WHOLE:
            found = integral("({} % {})", found, constant(1009), 0, 1008)
        return self.kept(found)

    def place(self, depth: int) -> Term:
        again = [each for each in self.named if each.dtype in INTEGERS]
        if again and self.draw.random() < 0.3:
            return self.draw.choice(again)
        return self.draw.choice([*VARIABLES.values(), *list(VARIABLES.values())[:2], DISTANCE])

    def entry(self, depth: int) -> Term:
        limits = self.draw.choice(((0, 15), (0, 100), (1, 9), (-7, 7), (-100, 100)))
        return self.loaded(INTEGERS, limits, depth) or self.place(depth)

    def sum(self, depth: int) -> Term:
        a = self.integer(depth)
        if self.draw.random() < 0.4:
            value = self.draw.choice((1, 2, 3, 5, 17, 40, 100))
            b = self.number(value)
            if self.draw.random() < 0.3:
                return integral("({1} - {0})", a, b, value - a.high, value - a.low)
        else:
            b = self.integer(depth)
        if self.draw.random() < 0.25 and a.size * b.size < WHOLE:
            return integral("({} * {})", a, b, *corners(lambda x, y: x * y, a, b))
        if self.draw.random() < 0.5:
            return integral("({} + {})", a, b, a.low + b.low, a.high + b.high)
        return integral("({} - {})", a, b, a.low - b.high, a.high - b.low)

    def divisor(self, depth: int) -> Term:
        """Never 0: a number, a computed value or an element of a table."""
        found = None
        if self.draw.random() < 0.2:
            found = self.loaded(INTEGERS, (1, 9), depth)
        elif self.draw.random() < 0.2:
            positive = integral("({} % {})", self.integer(depth), constant(7), 0, 6)
            found = integral("({} + {})", positive, constant(1), 1, 7)
        return found or self.number(self.draw.choice(DIVISORS))

    def divided(self, depth: int) -> Term:
        a, n = self.integer(depth), self.divisor(depth)
        how = self.draw.random()
        if how < 0.45:
            return integral("({} // {})", a, n, *corners(lambda x, y: x // y, a, n))
        if how < 0.85:
            return integral("({} % {})", a, n, min(n.low + 1, 0), max(n.high - 1, 0))
        if how < 0.93:
            form = 'torch.div({}, {}, rounding_mode="trunc")'
            return integral(form, a, n, *corners(lambda x, y: int(x / y), a, n))
        rest = n.size - 1
        return integral("torch.fmod({}, {})", a, n, min(0, -rest if a.low < 0 else 0), rest)

    def bits(self, depth: int) -> Term:
        a = self.integer(depth)
        how = self.draw.random()
        if how < 0.15:
            if a.dtype == "uint8":
                return Term(f"(~{a.text})", a.dtype, 255 - a.high, 255 - a.low)
            return Term(f"(~{a.text})", a.dtype, -1 - a.high, -1 - a.low)
        if how < 0.5:
            mask = self.number(self.draw.choice((1, 3, 6, 7, 15, 31, 63, 255)))
            return integral("({} & {})", a, mask, 0, mask.high)
        b = self.integer(depth)
        sign = self.draw.choice("&|^")
        return integral(f"({{}} {sign} {{}})", a, b, *bits_of(a, b))

    def shifted(self, depth: int) -> Term:
        a = self.integer(depth)
        by = constant(self.draw.choice((1, 2, 3, 5)))
        if self.draw.random() < 0.3:
            by = integral("({} & {})", self.integer(depth), constant(3), 0, 3)
        if self.draw.random() < 0.4 and a.size < 2**12:
            return integral("({} << {})", a, by, *corners(lambda x, y: int(x) << int(y), a, by))
        return integral("({} >> {})", a, by, *corners(lambda x, y: int(x) >> int(y), a, by))

    def clamped(self, a: Term, low: int, high: int) -> Term:
        text = f"{a.text}.clamp({low}, {high})"
        if not Term("", "", low, high).fits(a.dtype):
            text = f"{a.cast('int64').text}.clamp({low}, {high})"
            return Term(text, "int64", low, high)
        return Term(text, a.dtype, low, high)

    def between(self, depth: int) -> Term:
        a = self.integer(depth)
        how = self.draw.random()
        if how < 0.3:
            most = self.draw.choice((1, 8, 100))
            return self.clamped(a, 0 if self.draw.random() < 0.5 else -most, most)
        if how < 0.6:
            a = a.cast("int64") if a.dtype == "int8" else a
            return Term(f"{a.text}.abs()", a.dtype, 0, a.size)
        b = self.integer(depth)
        name, of = self.draw.choice((("minimum", min), ("maximum", max)))
        return integral(f"torch.{name}({{}}, {{}})", a, b, *corners(of, a, b))

    def narrowed(self, depth: int) -> Term:
        a = self.integer(depth)
        dtype = self.draw.choice((*INTEGERS, "int16"))
        if a.fits(dtype):
            return a.cast(dtype)
        return a.cast("int32") if a.fits("int32") else a

    def choice(self, depth: int) -> Term:
        a, b = self.integer(depth), self.integer(depth)
        form = f"torch.where({self.truth(depth).text}, {{}}, {{}})"
        return integral(form, a, b, min(a.low, b.low), max(a.high, b.high))

    def flag(self, depth: int) -> Term:
        dtype = self.draw.choice(("int64", "int32", "uint8"))
        return Term(self.truth(depth).text, "bool", 0, 1).cast(dtype)

    def floored(self, depth: int) -> Term:
        """An integer of a float: of one that was loaded, or of a logarithm, as T5's buckets."""
        a = self.loaded(("float32",), (-2.0, 2.0), depth) if self.draw.random() < 0.5 else None
        if a is not None:
            name = self.draw.choice(("floor", "ceil", "round", "trunc"))
            return Term(f"torch.{name}({a.text} * 4).int()", "int32", -8, 8)
        base = self.place(depth)
        text = f"(torch.log2({base.text}.abs() + 1.3) * 2).to(torch.int32)"
        return Term(text, "int32", 0, math.floor(2 * math.log2(base.size + 1.3)))

    def hashed(self, depth: int) -> Term:
        text = "((q_idx * 2654435761 + kv_idx * 40503 + h * 97) >> 7)"
        return integral("({} & {})", Term(text, "int64", 0, 2**46), constant(255), 0, 255)

    # Truths

    def truth(self, depth: int) -> Term:
        if depth > 1 and self.draw.random() < 0.4:
            a, b = self.truth(depth - 1).text, self.truth(depth - 1).text
            form = self.draw.choice(
                ("({} & {})", "({} | {})", "({} | {})", "({} ^ {})", "(~{} | {})",
                 "torch.logical_and({}, {})", "torch.logical_or({}, {})")
            )  # fmt: skip
            return Term(form.format(a, b), "bool", 0, 1)
        return self.compared(depth)

    def compared(self, depth: int) -> Term:
        how = self.draw.random()
        text = ""
        if how < 0.15 and (found := self.loaded(("bool",), (0, 1), depth)):
            text = found.text
        elif how < 0.3 and (found := self.loaded(FLOATS, (-2.0, 2.0), depth)):
            other = self.loaded(FLOATS, (-2.0, 2.0), depth, fresh=0.2)
            bound = other.text if other and self.draw.random() < 0.4 else repr(0.25)
            text = f"({found.text} {self.draw.choice(('<', '<=', '>', '>='))} {bound})"
        elif how < 0.4:
            text = self.ragged()
        elif how < 0.55:
            width = self.number(self.draw.choice((5, 33, 64, 100, 500)))
            text = f"({DISTANCE.text}.abs() <= {width.text})"
        elif how < 0.7:
            n = self.number(self.draw.choice((2, 3, 4, 7, 16)))
            text = (
                f"({self.integer(depth - 1).text} % {n.text} {self.draw.choice(('==', '!='))} 0)"
            )
        else:
            a, b = self.integer(depth - 1), self.integer(depth - 1)
            if self.draw.random() < 0.3:
                b = self.number(self.draw.randint(-3, 20))
            if not b.fits(a.dtype) and not b.dtype:
                a = a.cast("int64")
            sign = self.draw.choice(("<", "<=", ">", ">=", ">=", "==", "!="))
            text = f"({a.text} {sign} {b.text})"
        return Term(text, "bool", 0, 1)

    def ragged(self) -> str:
        """A comparison of a smooth function of a position, never at its edge."""
        place = self.draw.choice(("q_idx", "kv_idx", "(q_idx + kv_idx)"))
        name = self.draw.choice(("sin", "cos"))
        return f"(torch.{name}({place} * 0.7) > {self.draw.choice((-0.813, -0.337, 0.1234))})"
