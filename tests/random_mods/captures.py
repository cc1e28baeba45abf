"""What a random mod captures: tensors and numbers, and expressions that read them in range."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tests.random_mods.terms import DISTANCE, INTEGERS, Term, constant, integral

# A dimension is as long as the batch, the heads, the rows or the keys, or a number.
Dim = str | int
POSITIONS = {"B": "b", "H": "h", "L": "q_idx", "S": "kv_idx"}
SHAPES: tuple[tuple[Dim, ...], ...] = (
    ("S",), ("S",), ("S",), ("L",), ("H",), ("H",), ("B",), (17,), (64,), (33,),
    ("H", 65), ("H", 128), (16, 16), ("H", "S"), ("B", "S"), ("B", "L"), (3, "S"), ("B", "H"),
)  # fmt: skip


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


class Capturing(ABC):
    """Statements and captures of one mod; `room`: captures that it may have.

    again: how many of its terms get a name and are used again.
    """

    again = 0.2

    def __init__(self, draw: random.Random, room: int) -> None:
        self.draw, self.room = draw, room
        self.captures: list[Capture] = []
        self.lines: list[str] = []
        self.named: list[Term] = []

    def kept(self, term: Term) -> Term:
        """The term, which now and then gets a name and is used again."""
        if len(term.text) < 12 or self.draw.random() > self.again:
            return term
        named = Term(f"x{len(self.named)}", term.dtype, term.low, term.high)
        self.lines.append(f"{named.text} = {term.text}")
        self.named.append(named)
        return named

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
                return as_index(inner)
        if dim % 2 and self.draw.random() < 0.6:
            half = dim // 2
            return f"{DISTANCE.text}.clamp({-half}, {half}) + {half}"
        found = self.integer(depth - 1)
        if self.draw.random() < 0.3:
            return as_index(clamped(found, 0, dim - 1))
        wrapped = as_index(integral("({} % {})", found, constant(dim), 0, dim - 1))
        return f"-1 - {wrapped}" if self.draw.random() < 0.1 else wrapped

    @abstractmethod
    def integer(self, depth: int) -> Term:
        """A random integer expression."""


def clamped(a: Term, low: int, high: int) -> Term:
    """An integer held between two numbers, in a dtype that has them."""
    dtype = a.dtype if Term("", "", low, high).fits(a.dtype) else "int64"
    return Term(f"{a.cast(dtype).text}.clamp({low}, {high})", dtype, low, high)


def as_index(term: Term) -> str:
    """torch takes an index of eight bits for a mask, and none of sixteen."""
    return (term if term.dtype in ("int64", "int32") else term.cast("int64")).text
