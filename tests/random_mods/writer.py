"""Writes random expressions of torch over positions, captured tensors and captured numbers.

What jumps (comparisons, `//`, `%`, casts to integers) is computed from integers, or from floats as
they are loaded: where two precisions may round a value to different sides of a jump there is no
one right answer. Everything else is smooth, and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.random_mods.captures import Capturing, clamped
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

DIVISORS = (2, 3, 4, 5, 7, 8, 12, 16, 24, 64, 100, 128, 1000, -3, -8)


class Writer(Capturing):
    """Integers and truths."""

    def one_of(self, weights: dict[Callable[[int], Term], int], depth: int) -> Term:
        (make,) = self.draw.choices(list(weights), list(weights.values()))
        return make(depth - 1)

    # Integers

    def integer(self, depth: int) -> Term:
        if depth <= 0:
            return self.place(depth)
        found = self.one_of(
            {
                self.place: 2, self.entry: 4, self.sum: 3, self.divided: 6, self.bits: 3,
                self.shifted: 3, self.between: 2, self.narrowed: 2, self.choice: 1, self.flag: 1,
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
        # What is below 0 is where floors and truncations differ.
        a = DISTANCE if self.draw.random() < 0.4 else self.integer(depth)
        n = self.divisor(depth)
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
            if self.draw.random() < 0.3:
                return integral("({} << {})", constant(3), by, 3, 24)
        if self.draw.random() < 0.4 and a.size < 2**12:
            return integral("({} << {})", a, by, *corners(lambda x, y: int(x) << int(y), a, by))
        return integral("({} >> {})", a, by, *corners(lambda x, y: int(x) >> int(y), a, by))

    def between(self, depth: int) -> Term:
        a = self.integer(depth)
        how = self.draw.random()
        if how < 0.3:
            most = self.draw.choice((1, 8, 100))
            return clamped(a, 0 if self.draw.random() < 0.5 else -most, most)
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
