"""Random floats: smooth functions of positions and tables, and what a score_mod makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.random_mods.terms import DISTANCE, FLOATS, Term, constant, corners, floating, tamed
from tests.random_mods.writer import Writer

# Functions with the largest magnitude that they return.
BOUNDED = {
    "torch.sin({})": 1.0, "torch.cos({})": 1.0, "torch.tanh({})": 1.0, "torch.erf({})": 1.0,
    "torch.sigmoid({})": 1.0, "torch.atan({})": 1.6, "torch.exp(-{}.abs())": 1.0,
    "torch.exp2(-{}.abs())": 1.0, "torch.rsqrt({}.abs() + 1.0)": 1.0,
    "(1.0 / ({}.abs() + 1.0))": 1.0, "torch.expm1(-{}.abs())": 1.0,
}  # fmt: skip
# Functions with the magnitude that they make of one.
GROWING: dict[str, Callable[[float], float]] = {
    "torch.log({}.abs() + 0.5)": lambda x: max(math.log(x + 0.5), 0.7),
    "torch.log1p({}.abs())": math.log1p,
    "torch.log2({}.abs() + 1.0)": lambda x: math.log2(x + 1.0),
    "torch.sqrt({}.abs() + 0.25)": lambda x: math.sqrt(x + 0.25),
    "torch.nn.functional.silu({})": lambda x: x,
    "torch.nn.functional.gelu({})": lambda x: x,
    'torch.nn.functional.gelu({}, approximate="tanh")': lambda x: x,
    "torch.nn.functional.softplus({})": lambda x: x + 0.7,
    "torch.exp({}.clamp(-3.0, 1.5))": lambda x: 4.5,
    "({}.abs() ** 0.5)": math.sqrt,
}
# The same, of those whose result every device rounds alike: halves go in, and come out.
ROUNDED_ALIKE: dict[str, Callable[[float], float]] = {
    "torch.relu({})": lambda x: x,
    "torch.nn.functional.leaky_relu({}, 0.1)": lambda x: x,
    "({}.clamp(-4.0, 4.0) ** 2)": lambda x: 16.0,
    "({}.clamp(-2.0, 2.0) ** 3)": lambda x: 8.0,
    "{}.abs()": lambda x: x,
    "(-{})": lambda x: x,
    "{}.clamp(-1.5, 2.5)": lambda x: 2.5,
    "{}.clamp(min=-0.5)": lambda x: max(x, 0.5),
}


class RealWriter(Writer):
    """A Writer that also writes floats, and scores."""

    def real(self, depth: int) -> Term:
        if depth <= 0:
            return self.weight(depth)
        found = self.one_of(
            {
                self.weight: 2, self.applied: 4, self.mixed: 3, self.chosen: 2, self.slope: 2,
                self.ratio: 3, self.bounded: 1,
            },
            depth,
        )  # fmt: skip
        return self.kept(tamed(found))

    def weight(self, depth: int) -> Term:
        again = [each for each in self.named if each.dtype in FLOATS]
        if again and self.draw.random() < 0.3:
            return self.draw.choice(again)
        found = self.loaded(FLOATS, (-2.0, 2.0), depth)
        if found is None:
            return self.ratio(depth)
        # No half becomes the other kind: what is rounded is rounded once.
        half = self.draw.choice(("float16", "bfloat16"))
        rounded = found.dtype == "float32" and self.draw.random() < 0.1
        return found.cast(half) if rounded else found

    def ratio(self, depth: int) -> Term:
        """A float of an integer."""
        a = self.integer(depth)
        how = self.draw.random()
        if how < 0.2 and a.size <= 2048:
            return a.cast("float16" if a.size > 256 else self.draw.choice(FLOATS))
        factor = self.number(self.draw.choice((0.5, 0.1, 0.03, 0.37)))
        if how < 0.6:
            return floating("({} * {})", a, factor, *corners(lambda x, y: x * y, a, factor))
        by = self.number(self.draw.choice((3, 7.5, 64, 100)))
        return floating("({} / {})", a, by, *corners(lambda x, y: x / y, a, by))

    def slope(self, depth: int) -> Term:
        """As ALiBi's: an element of a table times a distance."""
        by = self.loaded(FLOATS, (0.01, 0.25), depth) or self.number(0.0625)
        far = DISTANCE if self.draw.random() < 0.6 else self.integer(depth)
        found = floating("({} * {})", by, far, *corners(lambda x, y: x * y, by, far))
        if self.draw.random() < 0.5:
            return found
        return Term(f"{found.text}.clamp(-20.0, 20.0)", found.dtype, -20.0, 20.0)

    def applied(self, depth: int) -> Term:
        """A function of a float; rounding its last bit's noise to a half would be a jump."""
        a = tamed(self.real(depth), 1000.0)
        how = self.draw.random()
        if how < 0.3:
            form = self.draw.choice(list(ROUNDED_ALIKE))
            limit = ROUNDED_ALIKE[form](a.size)
        elif how < 0.65:
            a = a.cast("float32")
            form = self.draw.choice(list(BOUNDED))
            limit = BOUNDED[form]
        else:
            a = a.cast("float32")
            form = self.draw.choice(list(GROWING))
            limit = GROWING[form](a.size)
        return Term(form.format(a.text), a.dtype, -limit, limit)

    def mixed(self, depth: int) -> Term:
        a, b = self.real(depth), self.real(depth)
        how = self.draw.random()
        if how < 0.35:
            return floating("({} + {})", a, b, a.low + b.low, a.high + b.high)
        if how < 0.6:
            return floating("({} - {})", a, b, a.low - b.high, a.high - b.low)
        if how < 0.85:
            return floating("({} * {})", a, b, *corners(lambda x, y: x * y, a, b))
        name, of = self.draw.choice((("minimum", min), ("maximum", max)))
        return floating(f"torch.{name}({{}}, {{}})", a, b, *corners(of, a, b))

    def chosen(self, depth: int) -> Term:
        a = self.real(depth)
        b = (
            self.real(depth)
            if self.draw.random() < 0.5
            else constant(self.draw.choice((0.0, -1.5)))
        )
        form = f"torch.where({self.truth(depth).text}, {{}}, {{}})"
        return floating(form, a, b, min(a.low, b.low), max(a.high, b.high))

    def bounded(self, depth: int) -> Term:
        """What floats do by jumps, of a float32 as it was loaded."""
        a = self.loaded(("float32",), (-2.0, 2.0), depth)
        if a is None:
            return self.weight(depth)
        form = self.draw.choice(
            ("({} // 0.25)", "({} % 0.5)", "torch.round({} * 2)", "({} % -0.75)")
        )
        return Term(form.format(a.text), "float32", -8.0, 8.0)

    # Scores

    def scored(self, depth: int) -> str:
        """What a score_mod returns."""
        text = "score"
        for _ in range(self.draw.choice((1, 1, 2))):
            text = self.score_step(text, depth)
        if self.draw.random() < 0.06:
            held = f"(q_idx >= kv_idx) | (kv_idx < 3) | {self.truth(depth).text}"
            return f"torch.where({held}, {text}, -float('inf'))"
        return text

    def score_step(self, text: str, depth: int) -> str:
        """One more thing that is made of a score: never steep, never unbounded, never flat.

        Where a row's largest score no longer depends on q and k, the reference run has no error
        and the gate asks for every bit.
        """
        how = self.draw.random()
        if how < 0.4:
            sign = self.draw.choice("+-")
            return f"({text} {sign} {tamed(self.real(depth), 12.0).text})"
        if how < 0.55:
            return f"({text} * ({tamed(self.real(depth), 0.6).text} + 1.0))"
        if how < 0.65:
            cap = self.number(self.draw.choice((5.0, 20.0, 30.0))).text
            return f"({cap} * torch.tanh({text} / {cap}))"
        if how < 0.75:
            other = self.draw.choice((f"({text} * 0.5)", f"({text} - 3.0)", "-4.0", "0"))
            return f"torch.where({self.truth(depth).text}, {text}, {other})"
        if how < 0.85:
            other = tamed(self.real(depth), 6.0).text
            name = self.draw.choice(("minimum", "maximum"))
            return f"(torch.{name}({text}, {other}) + {text} * 0.25)"
        form = self.draw.choice(
            ("torch.nn.functional.silu({})", "({0} * torch.sigmoid({0} * 1.702))",
             "torch.nn.functional.gelu({})", "torch.where({0} > 0, {0}, {0} * 0.25)",
             "{}.clamp(-3.0, 3.0)", "(2.0 * torch.sin({0}) + {0})", "torch.log1p({}.abs())",
             "torch.sqrt({}.abs() + 1.0)", "(4.0 * torch.erf({0} * 0.5) + {0} * 0.25)",
             "torch.relu({})", "(torch.exp({0}.clamp(max=1.0)) + {0} * 0.25)", "(-{})",
             "({}.double() * 0.75)", "{}.abs()", "torch.nn.functional.softplus({})")
        )  # fmt: skip
        return form.format(text)
