"""Pictures as data, their text as SVG or PNG, and those of one problem and of many.

Shapes are in pixels, and scales place values. A problem's picture is as wide as a phone's screen.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple, TypeAlias

from flexattn.kernels.choose.registry import short
from flexattn.records.record import Record
from flexattn.report import numbers
from flexattn.report.numbers import limits_of, products_of, reach, work
from flexattn.report.rivals import BenchResults
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


_WIDTH = 340.0
# Panels of a row in the picture of axes, the height of one, and what labels take below it.
_COLUMNS, PANEL, GAP = 3, 78.0, 52.0
# Letters of a line of the width, about.
_LETTERS = 54
# The picture of rivals: its width, letters of a line, the height of a row, and a color each.
_WIDE, _WIDE_LETTERS, ROW = 360.0, 58, 30.0
_RIVALS: tuple[Role, ...] = ("r0", "r1", "r2", "r3", "oth")
_SHAPES: tuple[Literal["dot", "diamond"], ...] = ("dot", "diamond")
_DENSITY = {
    "exact": "",
    "class": " The mask's class gives its density to a factor of about 1.4.",
    "unknown": " The mask's density is not recorded: rates are upper bounds.",
}
_BOUND = {"compute": "arithmetic", "memory": "memory bandwidth"}


class Mark(NamedTuple):
    """The mark of the default or the winner."""

    trial: int
    role: Role
    mark: Literal["diamond", "star"]
    word: str


def pictures(record: Record, name: str) -> tuple[Drawing, ...]:
    """All that can be drawn of a record; `name` begins the pictures' names."""
    if not numbers.timed(record):
        return ()
    made = []
    if limits_of(record.environment.device) is not None:
        made.append(roofline(record, f"{name}-roofline"))
    made.append(ranking(record, f"{name}-configs"))
    if numbers.effects(record):
        made.append(what_mattered(record, f"{name}-axes"))
    return tuple(made)


def _named(places: list[float], texts: list[str], y: float, turned: bool) -> list[DrawnShape]:
    """The names of an axis' values below their places, upwards where they would touch."""
    anchor: Literal["end", "middle"] = "end" if turned else "middle"
    found = zip(places, texts, strict=True)
    return [Label(x, y, text, "soft", anchor, turned) for x, text in found]


def ranking(record: Record, name: str) -> Drawing:
    """Every timed config by its median, with a bar between the quartiles."""
    times = numbers.timed(record)
    y = Scale(min(t.low for t in times), max(t.high for t in times), 165, 30)
    x = Scale(0, max(len(times) - 1, 1), 50, _WIDTH - 10)
    shapes: list[DrawnShape] = axis_y(y, 42, _WIDTH, "µs a call, configs from the fastest on")
    for rank, each in enumerate(times):
        shapes.append(Line(((x.at(rank), y.at(each.low)), (x.at(rank), y.at(each.high))), "oth"))
    points = {each.trial: (x.at(rank), y.at(each.us)) for rank, each in enumerate(times)}
    marked, height = _marked(record, points, lambda trial: short(record.trials[trial].config), 185)
    caption = "Each dot is a config: the median of its rounds, with a bar between the quartiles."
    alt = (
        f"{len(times)} configs from {three_figures(times[0].us)} to {three_figures(times[-1].us)} "
        "microseconds, the fastest first."
    )
    return Drawing(name, _WIDTH, height, (*shapes, *marked), alt, caption)


def what_mattered(record: Record, name: str) -> Drawing:
    """A panel an axis: the times at each of its values."""
    found, times = numbers.effects(record), numbers.comparable(record)
    best = times[0].us
    shapes: list[DrawnShape] = []
    across = (_WIDTH - 34) / _COLUMNS
    span = max(times[-1].us / best, 1.02)
    for place, effect in enumerate(found):
        left = 34 + across * (place % _COLUMNS)
        high = 14 + (PANEL + GAP) * (place // _COLUMNS)
        y = Scale(1.0, span, high + PANEL, high + 6)
        if place % _COLUMNS == 0:
            shapes += axis_y(y, 30, _WIDTH, "")
        title = clipped_label(effect.axis, int(across / LETTER))
        shapes.append(Label(left + across / 2, high - 1, title, "ink", "middle"))
        values = [value for value, _, _ in effect.values]
        x = Scale(0, max(len(values) - 1, 1), left + 14, left + across - 10)
        at = {value: x.at(number) for number, value in enumerate(values)}
        dots = [(at[getattr(t.config, effect.axis)], y.at(t.us / best)) for t in times]
        lowest = tuple((at[value], y.at(us / best)) for value, us, _ in effect.values)
        shapes += [Dots(tuple(dots), "oth", 3.5), Line(lowest, "win"), Dots(lowest, "win", 5)]
        told = [clipped_label(numbers.label(value), 7) for value in values]
        turned = len("".join(told)) * LETTER > across - 20
        shapes += _named([at[value] for value in values], told, high + PANEL + 14, turned)
    costs = ", ".join(f"{each.axis} {each.cost:.0%}" for each in found)
    caption = (
        "Time over the best at each value. Grey: every timed config; blue: the best at each "
        f"value, other numbers free. What the worst value costs: {costs}."
    )
    alt = f"Times at each value of each number. Cost of the worst: {costs}."
    height = 14 + (PANEL + GAP) * -(-len(found) // _COLUMNS)
    return Drawing(name, _WIDTH, height, tuple(shapes), alt, caption)


def roofline(record: Record, name: str) -> Drawing:
    """Every config under the device's roof, at the FLOP per byte that the problem has."""
    limits = limits_of(record.environment.device)
    assert limits is not None
    done, times = work(record), numbers.timed(record)
    peak = limits.peak(record.key.dtype, products_of(record))
    ridge = limits.ridge(record.key.dtype, products_of(record))
    ends = (min(done.intensity, ridge) / 8, max(done.intensity, ridge) * 8)
    rates = {each.trial: reach(record, each.us) for each in times}
    floor = min(min(rate.tflops for rate in rates.values()) / 2, ends[0] * limits.bandwidth)
    x, y = Scale(*ends, 42, _WIDTH - 8), Scale(floor, peak * 2, 165, 30)
    roof = ((ends[0], ends[0] * limits.bandwidth), (ridge, peak), (ends[1], peak))
    told = f"{limits.bandwidth:g} TB/s, then {peak:g} TFLOP/s"
    points = {trial: (x.at(done.intensity), y.at(rate.tflops)) for trial, rate in rates.items()}
    shapes = [
        *axis_y(y, 42, _WIDTH, f"TFLOP/s, under a roof of {told}"),
        *axis_x(x, 30, 165, "FLOP a byte"),
        Line(tuple((x.at(a), y.at(b)) for a, b in roof), "ink", 1.6),
    ]
    marked, height = _marked(
        record, points, lambda trial: f"{rates[trial].share:.0%} of the limit", 213
    )
    got = reach(record, times[0].us)
    caption = (
        f"At {three_figures(done.intensity)} FLOP a byte the limit is "
        f"{_BOUND[got.bound or 'compute']}. "
        "Work counts kept pairs; q, k, v and out move once." + _DENSITY[done.density]
    )
    alt = (
        f"Roofline of {record.environment.device}: {told}. The fastest config reaches "
        f"{got.tflops:.3g} TFLOP/s and {got.bandwidth:.3g} TB/s."
    )
    return Drawing(name, _WIDTH, height, (*shapes, *marked), alt, caption)


def _marked(
    record: Record, points: dict[int, Point], words: Callable[[int], str], top: float
) -> tuple[list[DrawnShape], float]:
    """A dot for each trial, the default's and the winner's marks, and a legend from `top` on.

    words: of a marked trial in the legend. The second value is the height of the picture.
    """
    marks = [mark for mark in _marks(record) if mark.trial in points]
    shapes: list[DrawnShape] = [Dots(tuple(points.values()), "oth")]
    shapes += [Dots((points[mark.trial],), mark.role, 11, mark.mark) for mark in marks]
    for place, mark in enumerate(marks):
        y = top + 16 * place
        text = clipped_label(f"{mark.word}: {words(mark.trial)}", _LETTERS)
        shapes += [Dots(((6, y - 4),), mark.role, 9, mark.mark), Label(16, y, text)]
    return shapes, top - 5 + 16 * len(marks)


def _marks(record: Record) -> list[Mark]:
    """The default's and the winner's mark; one where they agree."""
    decision = record.decision
    if decision.winner == decision.default:
        return [Mark(decision.winner, "win", "star", "winner, the default")]
    return [
        Mark(decision.default, "def", "diamond", "default"),
        Mark(decision.winner, "win", "star", "winner"),
    ]


def rivals_beside(bench: BenchResults, name: str) -> Drawing | None:
    """Each rival's time over ours, every row of the bench a line; right of 1, ours is faster."""
    found = [
        (row.name, [each for each in row.rivals if not math.isnan(each.ratio.value)])
        for row in bench.rows
    ]
    rows = [(name, rivals) for name, rivals in found if rivals]
    if not rows:
        return None
    names = bench.rivals
    # Of more rivals than colors the rest have another shape.
    every = ((role, 8, mark) for mark in _SHAPES for role in _RIVALS)
    looks = dict(zip(names, every, strict=False))
    known = [each.ratio.value for _, rivals in rows for each in rivals]
    scale = Scale(min(*known, 0.9), max(*known, 1.1), 8, _WIDE - 8)
    top = 8.0 + 16 * len(names)
    bottom = top + ROW * len(rows) + 6
    shapes: list[DrawnShape] = []
    for place, rival in enumerate(names):
        shapes += [Dots(((6, 10 + 16 * place),), *looks[rival])]
        shapes += [Label(16, 14 + 16 * place, clipped_label(rival, _WIDE_LETTERS))]
    shapes += axis_x(scale, top, bottom, "rival's time / ours")
    shapes.append(Line(((scale.at(1), top), (scale.at(1), bottom)), "ink"))
    for place, (title, rivals) in enumerate(rows):
        y = top + ROW * place + 14
        shown = clipped_label(title, _WIDE_LETTERS)
        shapes += [Box(0, y - 10, LETTER * len(shown), 13, "card"), Label(0, y, shown, "ink")]
        for each in rivals:
            shapes.append(Dots(((scale.at(each.ratio.value), y + 9),), *looks[each.name]))
    counted = f"All {len(rows)} rows."
    if len(rows) < len(bench.rows):
        counted = f"{len(rows)} of {len(bench.rows)} rows; the others have no time beside ours."
    caption = (
        f"{counted} Right of the line at 1, flexattn is faster. "
        "Ratios are medians of paired rounds."
    )
    alt = (
        f"{len(rows)} rows of the bench {bench.name}: rivals' time over ours, from "
        f"{min(known):.2f} to {max(known):.2f}."
    )
    return Drawing(name, _WIDE, bottom + 34, tuple(shapes), alt, caption)
