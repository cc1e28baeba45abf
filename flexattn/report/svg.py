"""Pictures as SVG inside of the page: small, sharp at any size, in the colors of its style."""

from __future__ import annotations

from html import escape

from flexattn.report.drawing import COLORS, Box, Dots, Drawing, DrawnShape, Label, Line, Point
from flexattn.util.printable import one_line


def svg(picture: Drawing) -> str:
    """The picture as an <svg> element; every text of it is escaped."""
    width, height = _short(picture.width), _short(picture.height)
    shapes = "".join(map(_shape, picture.shapes))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(one_line(picture.alt))}">{shapes}</svg>'
    )


def standalone(picture: Drawing, under: str = "") -> str:
    """As `svg`, as a file of its own, which has its colors; white behind, for pages that are dark.

    under: more of SVG, below the shapes.
    """
    roles = sorted({shape.role for shape in picture.shapes})
    style = "text{font:12px Helvetica,Arial,sans-serif}.l{fill:none}" + "".join(
        f".l.{role}{{stroke:{COLORS[role]}}}.f.{role}{{fill:{COLORS[role]}}}" for role in roles
    )
    head, shapes = svg(picture).split(">", 1)
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{under}{shapes}\n'
    )


def _shape(shape: DrawnShape) -> str:
    if isinstance(shape, Label):
        return _label(shape)
    if isinstance(shape, Box):
        return _box(shape)
    if isinstance(shape, Line):
        path = "M" + "L".join(map(_pair, shape.points))
        return f'<path class="l {shape.role}" d="{path}"{_width(shape.width)}/>'
    return _dots(shape)


def _dots(dots: Dots) -> str:
    # A stroke of no length with round ends is a dot: a few bytes each.
    if dots.mark == "dot":
        path = "".join(f"M{_pair(point)}h0" for point in dict.fromkeys(map(_rounded, dots.points)))
        return f'<path class="l o {dots.role}" d="{path}"{_width(dots.size)}/>'
    half = dots.size / 2
    corners = _DIAMOND if dots.mark == "diamond" else _STAR
    path = "".join(
        "M" + "L".join(_pair((x + half * dx, y + half * dy)) for dx, dy in corners) + "Z"
        for x, y in dots.points
    )
    return f'<path class="f {dots.role}" d="{path}"/>'


_DIAMOND = ((0, -1), (1, 0), (0, 1), (-1, 0))
_STAR = (
    (0, -1.2), (0.28, -0.39), (1.14, -0.37), (0.46, 0.15), (0.71, 0.97), (0, 0.48),
    (-0.71, 0.97), (-0.46, 0.15), (-1.14, -0.37), (-0.28, -0.39),
)  # fmt: skip


def _box(box: Box) -> str:
    kind = "l" if box.framed else "f"
    more = ' stroke-width="2.5"' if box.framed else ""
    if box.opacity != 1:
        more += f' opacity="{_short(box.opacity, 2)}"'
    sizes = (box.x, box.y, box.width, box.height)
    x, y, width, height = (_short(size) for size in sizes)
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect class="{kind} {box.role}" {place}{more}/>'


def _label(label: Label) -> str:
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    x, y = _short(label.x), _short(label.y)
    turn = f' transform="rotate(-60 {x} {y})"' if label.turned else ""
    text = escape(one_line(label.text))
    return f'<text class="f {label.role}" x="{x}" y="{y}"{anchor}{turn}>{text}</text>'


def _width(width: float) -> str:
    return "" if width == 1 else f' stroke-width="{_short(width)}"'


def _rounded(point: Point) -> Point:
    return round(point[0], 1), round(point[1], 1)


def _pair(point: Point) -> str:
    return f"{_short(point[0])},{_short(point[1])}"


def _short(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") or "0"
