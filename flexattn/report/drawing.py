"""What pictures of a report are made of: shapes in pixels, and scales that place values.

A Picture is data: flexattn/report/svg.py writes it into the page, flexattn/report/png.py as a
file where one is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flexattn.util.printable import one_line

# What a shape stands for decides its color: of the page's style, or of COLORS in a file. Okabe and
# Ito's palette, told apart by people who see fewer colors; shapes differ too.
Role = Literal["ink", "soft", "faint", "card", "win", "def", "oth", "heat", "r0", "r1", "r2", "r3"]
COLORS: dict[Role, str] = {
    "ink": "#22262b", "soft": "#5b636d", "faint": "#d9dce0", "card": "#ffffff",
    "win": "#0072b2", "def": "#d55e00", "oth": "#8a8f98", "heat": "#2a8a4a",
    "r0": "#d55e00", "r1": "#cc79a7", "r2": "#009e73", "r3": "#e69f00",
}  # fmt: skip
RIVALS: tuple[Role, ...] = ("r0", "r1", "r2", "r3", "oth")
# A scale is logarithmic once the largest value is this many times the least.
LOG_SPAN = 4.0
_TICKS = 5
# Pixels of a letter of a label, about.
LETTER = 6.0

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[Point, ...]
    role: Role
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dots:
    """Equal marks at points; `size` is their diameter."""

    points: tuple[Point, ...]
    role: Role
    size: float = 4.0
    mark: Literal["dot", "diamond", "star"] = "dot"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: filled with so much of its color, or framed."""

    x: float
    y: float
    width: float
    height: float
    role: Role
    opacity: float = 1.0
    framed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """Text on a base line at y; anchor: which part of it is at x. turned: upwards."""

    x: float
    y: float
    text: str
    role: Role = "soft"
    anchor: Literal["start", "middle", "end"] = "start"
    turned: bool = False


DrawnShape: TypeAlias = Line | Dots | Box | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes on width x height pixels, the words for who cannot see them, and a caption."""

    name: str
    width: float
    height: float
    shapes: tuple[DrawnShape, ...]
    alt: str
    caption: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from low to high on pixels from start to end, logarithmic where they span much."""

    low: float
    high: float
    start: float
    end: float

    @property
    def log(self) -> bool:
        """Whether equal distances are equal factors."""
        return self.low > 0 and self.high / self.low > LOG_SPAN

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (
            (math.log(each) for each in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values on the scale, at most five."""
        if not self.high > self.low:
            return [self.low]
        if self.log:
            subs = (1, 2, 5) if self.high / self.low < 200 else (1,)
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [sub * 10.0**power for power in powers for sub in subs]
        else:
            step = _step((self.high - self.low) / _TICKS)
            first = math.ceil(self.low / step - 1e-9)
            found = [step * (first + i) for i in range(int((self.high - self.low) / step) + 2)]
        inside = [t for t in found if self.low * (1 - 1e-9) <= t <= self.high * (1 + 1e-9)]
        return inside[:: -(-len(inside) // _TICKS)] if inside else [self.low]


def axis_x(scale: Scale, top: float, bottom: float, title: str) -> list[DrawnShape]:
    """Grid lines of a horizontal scale from top to bottom, ticks and a title below."""
    shapes: list[DrawnShape] = []
    for tick in scale.ticks():
        x = scale.at(tick)
        shapes += [Line(((x, top), (x, bottom)), "faint")]
        shapes += [Label(x, bottom + 13, three_figures(tick), anchor="middle")]
    middle = (scale.start + scale.end) / 2
    return [*shapes, Label(middle, bottom + 28, title, anchor="middle")]


def axis_y(scale: Scale, left: float, right: float, title: str) -> list[DrawnShape]:
    """Grid lines of a vertical scale from left to right, ticks beside it and a title on top."""
    shapes: list[DrawnShape] = []
    for tick in scale.ticks():
        y = scale.at(tick)
        shapes += [Line(((left, y), (right, y)), "faint")]
        shapes += [Label(left - 4, y + 4, three_figures(tick), anchor="end")]
    return [*shapes, Label(0, scale.end - 8, title)] if title else shapes


def clipped_label(text: str, length: int) -> str:
    """Text of a record as a label of at most so many characters; control characters escaped."""
    shown = one_line(text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def three_figures(value: float) -> str:
    """Three figures, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _step(least: float) -> float:
    """The next round number."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= least * (1 - 1e-9))
