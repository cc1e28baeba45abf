"""The pictures of one problem, as wide as a phone's screen, and those over many problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from flexattn.kernels.choose.registry import short
from flexattn.records.record import Record
from flexattn.report import numbers
from flexattn.report.drawing import (
    LETTER,
    Box,
    Dots,
    Drawing,
    DrawnShape,
    Label,
    Line,
    Point,
    Role,
    Scale,
    axis_x,
    axis_y,
    clipped_label,
    three_figures,
)
from flexattn.report.numbers import limits_of, products_of, reach, work
from flexattn.report.rivals import BenchResults

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
