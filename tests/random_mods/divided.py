"""Mods rich in `//`, `%`, shifts, shared subexpressions, and minima and maxima of negations."""

from __future__ import annotations

import random

from tests.random_mods.mods import Part, RandomMod, differentiable, random_part
from tests.random_mods.reals import RealWriter
from tests.random_mods.terms import DISTANCE, VARIABLES, WHOLE, Term, constant, integral
from tests.random_mods.writer import Writer


class _Divided(Writer):
    """Its integers; half of them get a name and are used again."""

    again = 0.5

    def integer(self, depth: int) -> Term:
        if depth <= 0:
            return self.place(depth)
        found = self.one_of(
            {
                self.divided: 6, self.tiled: 6, self.shifted: 4, self.extreme: 4, self.between: 2,
                self.bits: 2, self.sum: 2, self.entry: 1, self.place: 1,
            },
            depth,
        )  # fmt: skip
        if found.size > WHOLE:
            found = integral("({} % {})", found, constant(1009), 0, 1008)
        return self.kept(found)

    def tiled(self, depth: int) -> Term:
        """A position's tile, or its place among the tiles of a row."""
        name = self.draw.choice(("q_idx", "kv_idx"))
        size, wide = self.draw.choice((3, 8, 16, 24)), self.draw.choice((2, 4, 5, 8))
        tile = integral("({} // {})", VARIABLES[name], constant(size), 0, 8191 // size)
        tile = self.kept(tile)
        if self.draw.random() < 0.5:
            return integral("({} // {})", tile, constant(wide), 0, int(tile.high) // wide)
        return integral("({} % {})", tile, constant(wide), 0, wide - 1)

    def extreme(self, depth: int) -> Term:
        """The maximum, or minimum, of three of which one is negated."""
        a, b, c = (self.integer(depth - 1).cast("int64") for _ in range(3))
        name = self.draw.choice(("minimum", "maximum"))
        size = max(a.size, b.size, c.size)
        one, other = self.draw.sample((a.text, f"-{b.text}"), 2)
        text = f"torch.{name}(torch.{name}({one}, {other}), {c.text})"
        return Term(text, "int64", -size, size)

    def compared(self, depth: int) -> Term:
        if self.draw.random() < 0.3:
            return Term(self.near(depth), "bool", 0, 1)
        return super().compared(depth)

    def near(self, depth: int) -> str:
        """A neighbourhood in two directions: tiles of tiles, or any two distances."""
        if self.draw.random() < 0.5:
            size, wide = self.draw.choice((4, 8, 16)), self.draw.choice((2, 4, 5))
            tiles = f"(q_idx // {size}, kv_idx // {size})"
            self.lines.append(f"u{len(self.lines)}, w{len(self.lines)} = {tiles}")
            m, n = self.lines[-1].partition(" = ")[0].split(", ")
            one, other = f"({m} // {wide} - {n} // {wide})", f"({m} % {wide} - {n} % {wide})"
        else:
            far = DISTANCE if self.draw.random() < 0.5 else self.integer(depth - 1)
            one, other = far.cast("int64").text, self.integer(depth - 1).cast("int64").text
        most = self.draw.choice((1, 2, 9))
        return f"(({one}.abs() <= {most}) & ({other}.abs() <= {most}))"


class _DividedReal(_Divided, RealWriter):
    """Its floats and scores."""


def divided_mod(seed: int, index: int, score: bool = False) -> RandomMod:
    """The mod of this name; score: a score_mod that autograd differentiates is part of it."""
    draw = random.Random(f"{seed} {index} divided")
    kind = draw.choice(("score", "both") if score else ("score", "mask", "mask", "both"))
    part = _rich(draw, _DividedReal, score) if kind != "mask" else None
    return RandomMod(seed, index, part, _rich(draw, _Divided) if kind != "score" else None)


def _rich(draw: random.Random, kind: type[Writer], score: bool = False) -> Part:
    while True:
        part = random_part(draw, kind)
        divided = sum(map(str(part).count, ("//", "%", "<<", ">>", ".div(", "fmod")))
        if divided >= 2 and (not score or differentiable(part)):
            return part
