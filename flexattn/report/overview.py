"""Pictures over many problems: a bar for each speedup, and ours beside its rivals."""

from __future__ import annotations

import math

from flexattn.report.drawing import (
    LETTER,
    RIVALS,
    Box,
    Dots,
    Drawing,
    DrawnShape,
    Label,
    Line,
    Scale,
    axis_x,
    clipped_label,
)
from flexattn.report.rivals import BenchResults
from flexattn.report.summary import Summary

_WIDTH, ROW = 360.0, 30.0
# Letters of a line of the width, about.
_LETTERS = 58
BAR = (70.0, 12.0)


def bar(summary: Summary, most: float) -> Drawing | None:
    """A winner's speedup with its 95 % interval, from 1 to `most`; None for the default's."""
    if not summary.changed or summary.speedup is None:
        return None
    assert summary.low is not None and summary.high is not None
    width, height = BAR
    scale = Scale(min(1.0, summary.low), max(most, summary.high), 3, width - 3)
    middle = height / 2
    low, one, value, high = (
        scale.at(each) for each in (summary.low, 1.0, summary.speedup, summary.high)
    )
    shapes = (
        Line(((one, 0), (one, height)), "oth"),
        Line(((one, middle), (value, middle)), "win", 5),
        Line(((low, middle), (high, middle)), "ink"),
    )
    alt = f"{summary.speedup:.3f}, between {summary.low:.3f} and {summary.high:.3f}"
    return Drawing("speedup", width, height, shapes, alt, "")


def rivals_beside(bench: BenchResults, name: str) -> Drawing | None:
    """Each rival's time over ours, every row of the bench a line; right of 1, ours is faster."""
    rows = [row for row in bench.rows if any(_known(r.ratio.value) for r in row.rivals)]
    if not rows:
        return None
    names = bench.rivals
    roles = {rival: RIVALS[min(place, len(RIVALS) - 1)] for place, rival in enumerate(names)}
    known = [r.ratio.value for row in rows for r in row.rivals if _known(r.ratio.value)]
    scale = Scale(min(*known, 0.9), max(*known, 1.1), 8, _WIDTH - 8)
    top = 8.0 + 16 * len(names)
    bottom = top + ROW * len(rows) + 6
    shapes: list[DrawnShape] = []
    for place, rival in enumerate(names):
        shapes += [Dots(((6, 10 + 16 * place),), roles[rival], 8)]
        shapes += [Label(16, 14 + 16 * place, clipped_label(rival, _LETTERS))]
    shapes += axis_x(scale, top, bottom, "rival's time / ours")
    shapes.append(Line(((scale.at(1), top), (scale.at(1), bottom)), "ink"))
    for place, row in enumerate(rows):
        y = top + ROW * place + 14
        name = clipped_label(row.name, _LETTERS)
        shapes += [Box(0, y - 10, LETTER * len(name), 13, "card"), Label(0, y, name, "ink")]
        for each in row.rivals:
            if _known(each.ratio.value):
                shapes.append(Dots(((scale.at(each.ratio.value), y + 9),), roles[each.name], 8))
    caption = (
        f"{_counted(len(rows), len(bench.rows))} Right of the line at 1, flexattn is faster. "
        "Ratios are medians of paired rounds."
    )
    alt = (
        f"{len(rows)} rows of the bench {bench.name}: rivals' time over ours, from "
        f"{min(known):.2f} to {max(known):.2f}."
    )
    return Drawing(name, _WIDTH, bottom + 34, tuple(shapes), alt, caption)


def _counted(shown: int, there: int) -> str:
    if shown == there:
        return f"All {there} rows."
    return f"{shown} of {there} rows; the others have no time beside ours."


def _known(value: float) -> bool:
    return not math.isnan(value)
