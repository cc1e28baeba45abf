"""Pictures as data: shapes in pixels, scales that place values, and their text as SVG or PNG."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

from flexattn.util.text import one_line

# The role of a shape decides its color: of the page's style, or of COLORS in a file. Okabe and
# Ito's palette, told apart by people who see fewer colors; shapes differ too.
Role = Literal["ink", "soft", "faint", "card", "win", "def", "oth", "r0", "r1", "r2", "r3"]
COLORS: dict[Role, str] = {
    "ink": "#22262b", "soft": "#5b636d", "faint": "#d9dce0", "card": "#ffffff",
    "win": "#0072b2", "def": "#d55e00", "oth": "#8a8f98",
    "r0": "#d55e00", "r1": "#cc79a7", "r2": "#009e73", "r3": "#e69f00",
}  # fmt: skip
# A scale is logarithmic once the largest value is this many times the least.
LOG_SPAN = 4.0
_TICKS = 5
# Pixels of a letter of a label, about.
LETTER = 6.0
# Pixels of an inch on the page, and of a PNG, sharp on dense screens; points of a page's pixel.
_SHOWN, _DPI = 100, 200
_POINT = 72 / _SHOWN
# The corners of a mark, for half of its size; matplotlib's name of it.
_CORNERS = {
    "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
    "star": (
        (0, -1.2), (0.28, -0.39), (1.14, -0.37), (0.46, 0.15), (0.71, 0.97), (0, 0.48),
        (-0.71, 0.97), (-0.46, 0.15), (-1.14, -0.37), (-0.28, -0.39),
    ),
}  # fmt: skip
_MARKERS = {"dot": "o", "diamond": "D", "star": "*"}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}

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
    """A rectangle: filled, or framed."""

    x: float
    y: float
    width: float
    height: float
    role: Role
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
        """True where equal distances are equal factors."""
        return self.low > 0 and self.high / self.low > LOG_SPAN

    def at(self, value: float) -> float:
        """The pixel of a value."""
        place = math.log if self.log else float
        low, high = place(self.low), place(self.high)
        share = (place(value) - low) / (high - low) if high > low else 0.5
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
            least = (self.high - self.low) / _TICKS
            power = 10.0 ** math.floor(math.log10(least))
            rounded = (each * power for each in (1, 2, 2.5, 5, 10))
            step = next(each for each in rounded if each >= least * (1 - 1e-9))
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


def svg(picture: Drawing) -> str:
    """The picture as an <svg> element in the colors of a page's style; every text is escaped."""
    width, height = _short(picture.width), _short(picture.height)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(one_line(picture.alt))}">{"".join(map(_svg, picture.shapes))}</svg>'
    )


def _svg(shape: DrawnShape) -> str:
    match shape:
        case Line(points, role, width):
            return f'<path class="l {role}" d="{_path(points)}"{_stroke(width)}/>'
        case Dots(points, role, size, "dot"):
            # A stroke of no length with round ends is a dot: a few bytes each.
            rounded = dict.fromkeys((round(x, 1), round(y, 1)) for x, y in points)
            path = "".join(f"M{_pair(point)}h0" for point in rounded)
            return f'<path class="l o {role}" d="{path}"{_stroke(size)}/>'
        case Dots(points, role, size, mark):
            half, corners = size / 2, _CORNERS[mark]
            marks = ([(x + half * dx, y + half * dy) for dx, dy in corners] for x, y in points)
            return f'<path class="f {role}" d="{"".join(f"{_path(each)}Z" for each in marks)}"/>'
        case Box(x, y, width, height, role, framed):
            more = ' stroke-width="2.5"' * framed
            return (
                f'<rect class="{"l" if framed else "f"} {role}" x="{_short(x)}" y="{_short(y)}" '
                f'width="{_short(width)}" height="{_short(height)}"{more}/>'
            )
        case Label(x, y, text, role, anchor, turned):
            more = f' text-anchor="{anchor}"' * (anchor != "start")
            more += f' transform="rotate(-60 {_short(x)} {_short(y)})"' * turned
            place = f'x="{_short(x)}" y="{_short(y)}"'
            return f'<text class="f {role}" {place}{more}>{escape(one_line(text))}</text>'


def _stroke(width: float) -> str:
    return "" if width == 1 else f' stroke-width="{_short(width)}"'


def _path(points: tuple[Point, ...] | list[Point]) -> str:
    return "M" + "L".join(map(_pair, points))


def _pair(point: Point) -> str:
    return f"{_short(point[0])},{_short(point[1])}"


def _short(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") or "0"


def png(picture: Drawing) -> bytes:
    """The picture as a PNG by matplotlib, for where no page is shown; equal for equal pictures."""
    import matplotlib
    from matplotlib.figure import Figure

    # A `$` in a title is a character, not the start of a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        size = picture.width / _SHOWN, picture.height / _SHOWN
        figure = Figure(figsize=size, dpi=_DPI, facecolor=COLORS["card"])
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
        axes.axis("off")
        for order, shape in enumerate(picture.shapes):
            _draw(axes, shape, order)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Any, shape: DrawnShape, order: int) -> None:
    from matplotlib.patches import Rectangle

    common: dict[str, Any] = {"color": COLORS[shape.role], "zorder": order}
    match shape:
        case Line(points, _, width):
            axes.plot(*zip(*points, strict=True), lw=width * _POINT, **common)
        case Dots(points, _, size, mark):
            xy = zip(*points, strict=True)
            axes.plot(*xy, _MARKERS[mark], ms=size * _POINT, mew=0, **common)
        case Box(x, y, width, height, _, framed):
            common |= {"fill": not framed, "lw": 2 * framed}
            axes.add_patch(Rectangle((x, y), width, height, **common))
        case Label(x, y, text, _, anchor, turned):
            common |= {"rotation": 60} if turned else {}
            axes.text(
                x, y, one_line(text), ha=_ANCHORS[anchor], va="baseline", fontsize=11 * _POINT,
                rotation_mode="anchor", **common,
            )  # fmt: skip
