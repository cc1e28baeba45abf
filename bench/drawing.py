"""Pictures of the README and the manual, as SVG text: bars of rates, and what visualize finds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import Tensor

from flexattn.block_mask.visual import Picture

__all__ = ["bars", "cells", "curve"]

_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_COLORS = ("#0b5cad", "#e69f00", "#8a8f98", "#c05a9c")
_SHADES = ("#ffffff", "#dbe8f5", "#b3cfea", "#84b0dc", "#568fca", "#2f72b8", "#0b5cad", "#083f78")
_REMOVED = "#d8d8d8"


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
    width, height, left, top, bottom = 880, 340, 46, 58, 40
    highest = max(value for each in series.values() for value in each if value is not None)
    step = next(s for s in (100, 200, 250, 500, 1000) if highest / s <= 6)
    ceiling = step * (int(highest // step) + 1)
    plot = height - top - bottom
    each = (width - left - 10) / len(groups)
    bar = each * 0.84 / len(series)

    def y(value: float) -> float:
        return top + plot * (1 - value / ceiling)

    lines = [
        _open(width, height),
        f'<text x="{left}" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (name, color) in enumerate(zip(series, _COLORS, strict=False)):
        x = left + number * 175
        lines.append(f'<rect x="{x}" y="31" width="11" height="11" fill="{color}"/>')
        lines.append(f'<text x="{x + 16}" y="41" font-size="13">{escape(name)}</text>')
    for tick in range(0, ceiling + 1, step):
        at = y(tick)
        lines.append(f'<path d="M{left} {at:.1f}H{width - 10}" stroke="#e3e3e3"/>')
        lines.append(
            f'<text x="{left - 6}" y="{at + 4:.1f}" font-size="11" text-anchor="end">{tick}</text>'
        )
    lines.append(f'<text x="{left - 40}" y="{top - 6}" font-size="11">{escape(unit)}</text>')
    for place, group in enumerate(groups):
        start = left + place * each + each * 0.08
        for number, (values, color) in enumerate(zip(series.values(), _COLORS, strict=False)):
            value = values[place]
            if value is None:
                continue
            x = start + number * bar
            lines.append(
                f'<rect x="{x:.1f}" y="{y(value):.1f}" width="{bar - 1.5:.1f}" '
                f'height="{plot * value / ceiling:.1f}" fill="{color}"/>'
            )
            if number == 0:
                lines.append(
                    f'<text x="{x + bar / 2:.1f}" y="{y(value) - 3:.1f}" font-size="11" '
                    f'text-anchor="middle">{value:.0f}</text>'
                )
        lines.append(
            f'<text x="{start + each * 0.42:.1f}" y="{height - 20}" font-size="13" '
            f'text-anchor="middle">{escape(group)}</text>'
        )
    lines.append(f'<text x="{left}" y="{height - 4}" font-size="11">{escape(remark)}</text>')
    return "\n".join([*lines, "</svg>\n"])


def cells(picture: Picture, title: str = "") -> str:
    """A mask, darker where more of a cell is kept, or a score, darker where it is higher."""
    values = picture.share if picture.share is not None else _between(picture.scores)
    rows, columns = values.shape
    size, left, top = 256, 22, 24 if title else 6
    shades: dict[str, list[str]] = {}
    for row, kept in enumerate(values.tolist()):
        begin = 0
        colors = [_shade(value) for value in kept]
        for end in range(1, columns + 1):
            if end == columns or colors[end] != colors[begin]:
                run = f"M{begin} {row}h{end - begin}v1h{begin - end}z"
                shades.setdefault(colors[begin], []).append(run)
                begin = end
    lines = [
        _open(left + size + 6, top + size + 22),
    ]
    if title:
        lines.append(f'<text x="{left}" y="16" font-weight="bold">{escape(title)}</text>')
    lines.append(
        f'<g transform="translate({left} {top}) scale({size / columns:g} {size / rows:g})" '
        'shape-rendering="crispEdges">'
    )
    lines += [f'<path fill="{color}" d="{"".join(runs)}"/>' for color, runs in shades.items()]
    lines += [
        "</g>",
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#777"/>',
        f'<text x="{left + size / 2:g}" y="{top + size + 16}" text-anchor="middle">keys</text>',
        f'<text transform="translate(15 {top + size / 2:g}) rotate(-90)" text-anchor="middle">'
        "queries</text>",
    ]
    return "\n".join([*lines, "</svg>\n"])


def curve(given: Sequence[float], got: Sequence[float]) -> str:
    """What a score_mod that reads the score alone makes of it; thin, the score as it was."""
    size, left, top = 256, 22, 6
    reach = max(map(abs, given))

    def points(values: Sequence[float]) -> str:
        places = zip(given, values, strict=True)
        half = size / 2
        return " ".join(
            f"{left + half * (1 + x / reach):.1f},{top + half * (1 - y / reach):.1f}"
            for x, y in places
            if abs(y) <= reach
        )

    return "\n".join([
        _open(left + size + 6, top + size + 22),
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#777"/>',
        f'<polyline points="{points(given)}" fill="none" stroke="#bbbbbb"/>',
        f'<polyline points="{points(got)}" fill="none" stroke="{_COLORS[0]}" stroke-width="2"/>',
        f'<text x="{left + size / 2:g}" y="{top + size + 16}" text-anchor="middle">'
        f"score, {-reach:g} to {reach:g}</text>",
        f'<text transform="translate(15 {top + size / 2:g}) rotate(-90)" text-anchor="middle">'
        "its new value</text>",
        "</svg>\n",
    ])  # fmt: skip


def _open(width: int, height: int) -> str:
    """The head of a picture, white behind, for pages that are dark."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_FONT} font-size="12">\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )


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
