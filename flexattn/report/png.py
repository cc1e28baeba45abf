"""Pictures as PNG files, by matplotlib, for where no page can be shown."""

from __future__ import annotations

import io
from typing import Any

from flexattn.report.drawing import COLORS, Box, Dots, Drawing, Label, Line
from flexattn.util.printable import one_line

# Pixels of an inch on the page, and of the file: sharp on dense screens too.
_SHOWN, DPI = 100, 200
# Points of a pixel of the page.
_POINT = 72 / _SHOWN
_MARKS = {"dot": "o", "diamond": "D", "star": "*"}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def png(picture: Drawing) -> bytes:
    """The picture as a PNG, equal bytes for equal pictures."""
    import matplotlib
    from matplotlib.figure import Figure

    # A `$` in a title is a character, not the start of a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        size = picture.width / _SHOWN, picture.height / _SHOWN
        figure = Figure(figsize=size, dpi=DPI, facecolor=COLORS["card"])
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
        axes.axis("off")
        for order, shape in enumerate(picture.shapes):
            _draw(axes, shape, order)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Any, shape: Line | Dots | Box | Label, order: int) -> None:
    common: dict[str, Any] = {"color": COLORS[shape.role], "zorder": order}
    if isinstance(shape, Line):
        axes.plot(*zip(*shape.points, strict=True), lw=shape.width * _POINT, **common)
    elif isinstance(shape, Dots):
        size, mark = shape.size * _POINT, _MARKS[shape.mark]
        axes.plot(*zip(*shape.points, strict=True), mark, ms=size, mew=0, **common)
    elif isinstance(shape, Box):
        from matplotlib.patches import Rectangle

        filled: dict[str, Any] = {
            "fill": not shape.framed,
            "alpha": shape.opacity,
            "lw": 2 * shape.framed,
        }
        axes.add_patch(
            Rectangle((shape.x, shape.y), shape.width, shape.height, **filled, **common)
        )
    else:
        turned = {"rotation": 60} if shape.turned else {}
        anchor = _ANCHORS[shape.anchor]
        text = one_line(shape.text)
        axes.text(shape.x, shape.y, text, ha=anchor, va="baseline", fontsize=11 * _POINT,
                  rotation_mode="anchor", **turned, **common)  # fmt: skip
