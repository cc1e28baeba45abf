"""The pictures of one problem: its space from above, every config, what mattered, the roofline."""

from __future__ import annotations

import math
from typing import Any

from flexattn.records.record import Record
from flexattn.report import numbers
from flexattn.report.drawing import (
    DEFAULT,
    INK,
    OTHER,
    WINNER,
    Picture,
    clipped,
    figure,
    logarithmic,
    number,
    picture,
    style,
)
from flexattn.report.importance import Importance
from flexattn.report.limits import limits_of
from flexattn.report.roofline import reach, tf32, work

# Inches: two pictures stand side by side on a wide page. Small panels of a row.
WIDTH, COLUMNS = 5.6, 4
# Letters that the ticks of a small panel have room for.
ACROSS = 10


def pictures(record: Record, mattered: Importance, name: str) -> tuple[Picture, ...]:
    """All that can be drawn of a record; `name` starts the files' names."""
    if not numbers.timed(record):
        return ()
    made = []
    seen = numbers.landscape(record)
    if seen is not None:
        made.append(map_of(record, seen, f"{name}-landscape.png"))
    if limits_of(record.environment.device) is not None:
        made.append(roofline(record, f"{name}-roofline.png"))
    made.append(ranking(record, f"{name}-configs.png"))
    if numbers.effects(record):
        made.append(what_mattered(record, mattered, f"{name}-axes.png"))
    return tuple(made)


def map_of(record: Record, seen: numbers.Landscape, name: str) -> Picture:
    """Heat map of the best median over two axes, the default's and the winner's cells framed."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    best = min(us for row in seen.best for us in row if us is not None)
    shown = [[math.nan if us is None else us / best for us in row] for row in seen.best]
    worst = max(value for row in shown for value in row if not math.isnan(value))
    height = max(2.6, 1.4 + 0.55 * len(seen.rows))
    with style():
        made = figure(max(WIDTH, 1.8 + 0.8 * len(seen.columns)), height)
        axes = made.subplots()
        axes.grid(visible=False)
        image = axes.imshow(shown, cmap="Greens_r", vmin=1.0, vmax=max(worst, 1.05), aspect="auto")
        for i, row in enumerate(seen.best):
            for j, us in enumerate(row):
                ratio = 0.0 if us is None else us / best
                light = (ratio - 1) / max(worst - 1, 0.05) > 0.5
                text = "no time" if us is None else f"{number(us)}\n×{ratio:.2f}"
                color = OTHER if us is None else INK if light else "white"
                axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
        marks = ((record.decision.default, DEFAULT, 0.42), (record.decision.winner, WINNER, 0.47))
        for index, color, half in marks:
            config = record.trials[index].config
            y, x = (numbers.on_axis(config, axis) for axis in (seen.row_axis, seen.column_axis))
            if y not in seen.rows or x not in seen.columns:
                continue  # its whole row or column has no time
            i, j = seen.rows.index(y), seen.columns.index(x)
            corner = (j - half, i - half)
            frame = Rectangle(corner, 2 * half, 2 * half, fill=False, ec=color, lw=2.5)
            frame.set_path_effects([withStroke(linewidth=4.5, foreground="white")])
            axes.add_patch(frame)
        axes.set_xticks(range(len(seen.columns)), map(numbers.label, seen.columns))
        axes.set_yticks(range(len(seen.rows)), map(numbers.label, seen.rows))
        axes.set(xlabel=seen.column_axis, ylabel=seen.row_axis)
        made.colorbar(image, ax=axes, label="time / best")
    caption = (
        f"Best median over all other axes, in µs and as a multiple of the best ({number(best)} "
        "µs). Blue frame: the winner's cell; orange: the static default's."
    )
    alt = (
        f"Heat map over {seen.row_axis} ({_list(seen.rows)}) and {seen.column_axis} "
        f"({_list(seen.columns)}): the best cell takes {number(best)} microseconds, the worst "
        f"{worst:.2f} times that."
    )
    return picture(made, name, alt, caption)


def ranking(record: Record, name: str) -> Picture:
    """Every timed config by its median with quartile bars; below, the untimed ones by reason."""
    times, untimed = numbers.timed(record), numbers.reasons(record)[:8]
    with style():
        below = 0.5 + 0.22 * len(untimed) if untimed else 0.0
        made = figure(WIDTH, 3.3 + below)
        ratios = [3.3, below] if untimed else [1.0]
        panels = made.subplots(len(ratios), squeeze=False, height_ratios=ratios)[:, 0]
        _dots(panels[0], record, times)
        if untimed:
            _bars(panels[1], untimed)
    count = sum(each.count for each in untimed)
    caption = (
        "Each dot is a config: the median of its rounds, with a bar between the quartiles."
        + (" Below: configs without a time, by the stage that stopped them." if untimed else "")
    )
    alt = (
        f"{len(times)} configs from {number(times[0].us)} to {number(times[-1].us)} "
        f"microseconds, the fastest first; {count} configs have no time."
    )
    return picture(made, name, alt, caption)


def _dots(axes: Any, record: Record, times: tuple[numbers.Timed, ...]) -> None:
    ranks = range(1, len(times) + 1)
    us = [each.us for each in times]
    spread = [[each.us - each.low for each in times], [each.high - each.us for each in times]]
    axes.errorbar(ranks, us, spread, fmt="o", ms=3, color=OTHER, elinewidth=0.9, zorder=2)
    for index, color, marker, word in _marked(record):
        found = next(((r, t) for r, t in zip(ranks, times, strict=True) if t.trial == index), None)
        if found is not None:
            told = f"{word}: {numbers.short(found[1].config)}, {number(found[1].us)} µs"
            axes.plot([found[0]], [found[1].us], marker, ms=9, color=color, label=told, zorder=3)
    logarithmic(axes, "y", us[0], us[-1])
    axes.set(xlabel="configs, fastest first", ylabel="µs a call")
    axes.legend(loc="upper left")


def _bars(axes: Any, untimed: tuple[numbers.Reason, ...]) -> None:
    """A bar a reason, its words behind it, so that no label pushes the dots above aside."""
    counts = [each.count for each in untimed]
    words = [f"{each.count} {clipped(f'{each.stage}: {each.name}', 46)}" for each in untimed]
    axes.bar_label(
        axes.barh(range(len(counts)), counts, color=OTHER), words, padding=4, fontsize=8
    )
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(0, 2.2 * max(counts))
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_title("configs without a time", loc="left", fontsize=9)


def what_mattered(record: Record, mattered: Importance, name: str) -> Picture:
    """Optuna's importances, where there are any, beside the times at each value of each axis."""
    found, times = numbers.effects(record), numbers.timed(record)
    best = times[0].us
    span = max(times[-1].us / best, 1.02)
    with style():
        wide = 2 * bool(mattered.shares)
        lines = -(-(wide + len(found)) // COLUMNS)
        made = figure(WIDTH, 0.3 + 1.9 * lines)
        cells = made.add_gridspec(lines, COLUMNS)
        if mattered.shares:
            _shares(made.add_subplot(cells[0, :2]), mattered)
        for place, effect in enumerate(found, wide):
            axes = made.add_subplot(cells[place // COLUMNS, place % COLUMNS])
            places = {value: at for at, (value, _, _) in enumerate(effect.values)}
            at = [places[numbers.on_axis(each.config, effect.axis)] for each in times]
            axes.plot(at, [each.us / best for each in times], "o", ms=2.5, color=OTHER, alpha=0.6)
            lowest = [us / best for _, us, _ in effect.values]
            axes.plot(range(len(lowest)), lowest, "-D", ms=4, color=WINNER)
            told = [numbers.label(value) for value in places]
            turned = 45 if len("".join(told)) > ACROSS else 0
            axes.set_xticks(range(len(told)), told, fontsize=8, rotation=turned)
            axes.margins(x=0.2)
            axes.set_title(effect.axis, fontsize=9)
            logarithmic(axes, "y", 1.0, span)
            axes.set_ylim(span**-0.05, span**1.05)
            first = place % COLUMNS == 0 or place == wide
            axes.tick_params(labelleft=first)
            if first:
                axes.set_ylabel("time / best")
    costs = ", ".join(f"{each.axis} {each.cost:.0%}" for each in found)
    caption = (
        (
            "Importance: what sets the best quarter apart, by Optuna's PED-ANOVA. "
            if mattered.shares
            else ""
        )
        + "Grey: every timed config; blue: the best at each value, other axes free. "
        + f"Cost of an axis' worst value: {costs}."
    )
    shares = ", ".join(f"{axis} {share:.0%}" for axis, share in mattered.shares)
    alt = f"Importance of the axes: {shares or 'not computed'}. Cost of the worst value: {costs}."
    return picture(made, name, alt, caption)


def _shares(axes: Any, mattered: Importance) -> None:
    names = [axis for axis, _ in mattered.shares]
    bars = axes.barh(names, [100 * share for _, share in mattered.shares], color=WINNER)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(visible=False, axis="y")
    axes.set_title("importance, %", fontsize=9)


def roofline(record: Record, name: str) -> Picture:
    """Every config under the device's roof, at the FLOP per byte that the problem has."""
    limits = limits_of(record.environment.device)
    assert limits is not None
    done, times = work(record), numbers.timed(record)
    peak = limits.peak(record.key.dtype, tf32(record))
    ridge = limits.ridge(record.key.dtype, tf32(record))
    x = (min(done.intensity, ridge) / 8, max(done.intensity, ridge) * 8)
    rates = [reach(record, each.us).tflops for each in times]
    with style():
        made = figure(WIDTH, 3.4)
        axes = made.subplots()
        axes.plot([x[0], ridge, x[1]], [x[0] * limits.bandwidth, peak, peak], color=INK, lw=1.6)
        axes.plot([done.intensity] * len(rates), rates, "o", ms=3, color=OTHER, alpha=0.6)
        for index, color, marker, word in _marked(record):
            us = next((each.us for each in times if each.trial == index), None)
            if us is not None:
                got = reach(record, us)
                told = f"{word}: {got.share:.0%} of the limit"
                axes.plot([done.intensity], [got.tflops], marker, ms=9, color=color, label=told)
        y = (min(min(rates) / 2, x[0] * limits.bandwidth), peak * 3)
        logarithmic(axes, "x", *x)
        logarithmic(axes, "y", *y)
        axes.set(xlim=x, ylim=y)
        roof = f"{limits.bandwidth:g} TB/s, then {peak:g} TFLOP/s"
        axes.set(xlabel="FLOP / byte", ylabel="TFLOP/s", title=f"roof: {roof}")
        axes.legend(loc="lower right")
    got = reach(record, times[0].us)
    caption = (
        f"At {number(done.intensity)} FLOP a byte the limit is {_BOUND[got.bound or 'compute']}. "
        "Work counts kept pairs; q, k, v and out move once." + _DENSITY[done.density]
    )
    alt = (
        f"Roofline of {record.environment.device}: {roof}. The fastest config reaches "
        f"{got.tflops:.3g} TFLOP/s and {got.bandwidth:.3g} TB/s."
    )
    return picture(made, name, alt, caption)


_DENSITY = {
    "exact": "",
    "class": " The mask's class gives its density to a factor of about 1.4.",
    "unknown": " The mask's density is not recorded: rates are upper bounds.",
}
_BOUND = {"compute": "arithmetic", "memory": "memory bandwidth"}


def _marked(record: Record) -> list[tuple[int, str, str, str]]:
    """Trial, color, marker and word of the default and the winner; one mark where they agree."""
    decision = record.decision
    if decision.winner == decision.default:
        return [(decision.winner, WINNER, "*", "winner, the default")]
    return [(decision.default, DEFAULT, "D", "default"), (decision.winner, WINNER, "*", "winner")]


def _list(values: tuple[numbers.Value, ...]) -> str:
    return ", ".join(map(numbers.label, values))
