"""Pictures of the README and the manual, as SVG text: bars of rates, and what visualize finds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexattn.block_mask.visual import Picture as Mask
from flexattn.report.figures import (
    COLORS,
    Box,
    Drawing,
    DrawnShape,
    Label,
    Line,
    Role,
    Scale,
    axis_y,
    svg,
)

_SERIES: tuple[Role, ...] = ("win", "r3", "oth", "r1")
_SHADES = ("#ffffff", "#dbe8f5", "#b3cfea", "#84b0dc", "#568fca", "#2f72b8", "#0b5cad", "#083f78")
_REMOVED = "#d8d8d8"
# Where a square picture's pixels begin, and how many they are.
_LEFT, _TOP, _SIZE = 10, 24, 256


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


def bars(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: dict[str, Sequence[float | None]],
    remark: str,
) -> str:
    """Upright bars, a group for each label and in it a bar for each series; None leaves a gap.

    The first series is ours and has its numbers written above. The axis begins at 0. The remark
    stands below.
    """
    width, height, left, bottom = 880, 340, 46, 300
    highest = max(value for each in series.values() for value in each if value is not None)
    rates = Scale(0.0, highest, bottom, 70)
    each = (width - left - 10) / len(groups)
    bar = each * 0.84 / len(series)
    shapes: list[DrawnShape] = [
        *axis_y(rates, left, width - 10, unit),
        Label(left, 20, title, "ink"),
        Label(left, height - 4, remark),
    ]
    for place, group in enumerate(groups):
        shapes.append(Label(left + each * (place + 0.5), bottom + 20, group, "ink", "middle"))
    for number, ((name, values), role) in enumerate(zip(series.items(), _SERIES, strict=False)):
        x = left + number * 175
        shapes += [Box(x, 31, 11, 11, role), Label(x + 16, 41, name, "ink")]
        for place, value in enumerate(values):
            if value is None:
                continue
            x, y = left + each * (place + 0.08) + number * bar, rates.at(value)
            shapes.append(Box(x, y, bar - 1.5, bottom - y, role))
            if number == 0:
                shapes.append(Label(x + bar / 2, y - 3, f"{value:.0f}", "ink", "middle"))
    return standalone(Drawing("bars", width, height, tuple(shapes), title, remark))


def cells(picture: Mask, title: str = "") -> str:
    """A mask, darker where more of a cell is kept, or a score, darker where it is higher."""
    values = picture.share if picture.share is not None else _between(picture.scores)
    rows, columns = values.shape
    shades: dict[str, list[str]] = {}
    for row, kept in enumerate(values.tolist()):
        begin = 0
        colors = [_shade(value) for value in kept]
        for end in range(1, columns + 1):
            if end == columns or colors[end] != colors[begin]:
                # The lightest is what the picture's ground has.
                if colors[begin] != _SHADES[0]:
                    shades.setdefault(colors[begin], []).append(f"M{begin} {row}h{end - begin}")
                begin = end
    # A run of cells is a stroke as wide as a row.
    place = f"translate({_LEFT} {_TOP}) scale({_SIZE / columns:g} {_SIZE / rows:g})"
    strokes = (f'<path stroke="{color}" d="{"".join(runs)}"/>' for color, runs in shades.items())
    under = (
        f'<g transform="{place} translate(0 .5)" shape-rendering="crispEdges">'
        f"{''.join(strokes)}</g>"
    )
    return _square(f"{title}: queries down" if title else "queries down", "keys", (), under)


def curve(given: Sequence[float], got: Sequence[float]) -> str:
    """A curve of a score_mod that reads the score alone; thin, the score as it was."""
    reach = max(map(abs, given))
    across = Scale(-reach, reach, _LEFT, _LEFT + _SIZE)
    upwards = Scale(-reach, reach, _TOP + _SIZE, _TOP)

    def line(values: Sequence[float], role: Role, width: float) -> Line:
        places = zip(given, values, strict=True)
        return Line(
            tuple((across.at(x), upwards.at(y)) for x, y in places if abs(y) <= reach), role, width
        )

    lines = line(given, "oth", 1.0), line(got, "win", 2.0)
    return _square("its new value", f"score, {-reach:g} to {reach:g}", lines)


def _square(above: str, below: str, shapes: Sequence[DrawnShape], under: str = "") -> str:
    middle, bottom = _LEFT + _SIZE / 2, _TOP + _SIZE
    frame: tuple[DrawnShape, ...] = (
        Box(_LEFT, _TOP, _SIZE, _SIZE, "soft", framed=True),
        Label(_LEFT, _TOP - 8, above, "ink"),
        Label(middle, bottom + 16, below, "ink", "middle"),
    )
    picture = Drawing("", _LEFT + _SIZE + 10, bottom + 24, (*frame, *shapes), above, "")
    return standalone(picture, under)


def _between(scores: Tensor | None) -> Tensor:
    """Finite scores from 0 to 1; NaN where a score is minus infinity, which removes the key."""
    assert scores is not None
    finite = scores[scores.isfinite()]
    low, high = finite.min(), finite.max()
    between = (scores - low) / (high - low).clamp(min=1e-30)
    return between.masked_fill(~scores.isfinite(), float("nan"))


def _shade(value: float) -> str:
    """Eight shades; only 0 is the lightest, so that no kept key looks removed."""
    if value != value:
        return _REMOVED
    if value <= 0:
        return _SHADES[0]
    return _SHADES[1 + min(int(value * (len(_SHADES) - 1)), len(_SHADES) - 2)]
