"""The pictures over all problems: gain and share of the limit, and ours beside its rivals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexattn.report.drawing import (
    DEFAULT,
    INK,
    OTHER,
    RIVAL,
    WINNER,
    Picture,
    clipped,
    figure,
    logarithmic,
    picture,
    style,
)
from flexattn.report.rivals import Bench
from flexattn.report.summary import Summary

# Rows of a picture, and inches of each.
MOST, ROW = 60, 0.26
_MARKERS = "osD^vP*X"


def gains(summaries: Sequence[Summary]) -> Picture | None:
    """Speedup over the default with its interval, and the share of the device's limit."""
    shown = [each for each in summaries if each.speedup is not None][:MOST]
    if not shown:
        return None
    limited = any(_share(each.winner.reach) is not None for each in shown)
    places = range(len(shown))
    with style():
        made = figure(10.0 if limited else 6.4, 1.5 + ROW * len(shown))
        panels = made.subplots(1, 1 + limited, squeeze=False, sharey=True)[0]
        for place, each in zip(places, shown, strict=True):
            assert each.speedup is not None and each.low is not None and each.high is not None
            color = WINNER if each.changed else DEFAULT
            panels[0].plot([each.low, each.high], [place, place], color=color, lw=1.5)
            panels[0].plot([each.speedup], [place], "*" if each.changed else "D", color=color)
        panels[0].axvline(1.0, color=INK, lw=0.8)
        panels[0].set_yticks(places, [clipped(each.title, 34) for each in shown])
        panels[0].invert_yaxis()
        panels[0].locator_params(axis="x", nbins=6)
        panels[0].set(xlabel="default's time / winner's")
        if limited:
            for place, each in zip(places, shown, strict=True):
                pair = _share(each.default.reach), _share(each.winner.reach)
                values = [100 * share for share in pair if share is not None]
                panels[1].plot(values, [place] * len(values), color=OTHER, lw=1.5, zorder=1)
                for share, marker, color in zip(pair, "D*", (DEFAULT, WINNER), strict=True):
                    if share is not None:
                        size = 5 if marker == "D" else 8
                        panels[1].plot([100 * share], [place], marker, ms=size, color=color)
            panels[1].set(xlabel="% of the limit that binds (compute or bandwidth)")
            panels[1].set_xlim(left=0)
            panels[1].margins(x=0.08)
    won = sum(each.changed for each in shown)
    speedups = [each.speedup for each in shown if each.speedup is not None]
    caption = (
        "Left: speedup over the static default with its 95 % interval; orange: the default stayed."
        + (" Right: orange the default, blue the winner." if limited else "")
    )
    alt = (
        f"{len(shown)} problems: {won} have a winner other than the default; speedups from "
        f"{min(speedups):.2f} to {max(speedups):.2f}."
    )
    return picture(made, "overview.png", alt, caption)


def beside(bench: Bench, name: str) -> Picture | None:
    """Each rival's time over ours, a row of the bench a line; right of 1, ours is faster."""
    rows = [row for row in bench.rows if any(_known(r.ratio.value) for r in row.rivals)][:MOST]
    if not rows:
        return None
    names = bench.rivals
    colors = dict(zip(names, (DEFAULT, RIVAL, "#009e73", "#e69f00", OTHER), strict=False))
    values = []
    with style():
        made = figure(7.6, 1.6 + ROW * len(rows))
        axes = made.subplots()
        for number, rival in enumerate(names):
            points = [
                (each.ratio.value, place)
                for place, row in enumerate(rows)
                for each in row.rivals
                if each.name == rival and _known(each.ratio.value)
            ]
            values += [value for value, _ in points]
            marker = _MARKERS[number % len(_MARKERS)]
            color = colors.get(rival, OTHER)
            axes.plot(
                *zip(*points, strict=True), marker, color=color, label=clipped(rival, 34), ms=6
            )
        axes.axvline(1.0, color=INK, lw=0.8)
        axes.set_yticks(range(len(rows)), [clipped(row.name, 34) for row in rows])
        axes.invert_yaxis()
        logarithmic(axes, "x", min(values), max(values))
        axes.set(xlabel="rival's time / ours")
        made.legend(loc="outside upper center", ncols=min(len(names), 4))
    caption = "Right of the line at 1, flexattn is faster. Ratios are medians of paired rounds."
    alt = (
        f"{len(rows)} rows of the bench {bench.name}: rivals' time over ours, from "
        f"{min(values):.2f} to {max(values):.2f}."
    )
    return picture(made, name, alt, caption)


def _known(value: float) -> bool:
    return not math.isnan(value)


def _share(reach: object) -> float | None:
    return getattr(reach, "share", None)
