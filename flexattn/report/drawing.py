"""How every picture of a report looks: colors, a figure, and its PNG."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

from flexattn.util.printable import one_line

# Okabe and Ito's palette, told apart by people who see fewer colors; shapes differ too.
WINNER, DEFAULT, RIVAL, OTHER = "#0072b2", "#d55e00", "#cc79a7", "#8a8f98"
INK, FAINT = "#22262b", "#d9dce0"
# Pixels of an inch in the file and on the page: sharp on dense screens too.
DPI, SHOWN = 150, 100
# A scale is logarithmic once the largest value is this many times the least.
LOG_SPAN = 4.0

_STYLE: Any = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": OTHER,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    # A `$` in a title is a character, not the start of a formula.
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG with the name of its file, the words for who cannot see it, and its caption.

    size: width and height on a page, in CSS pixels.
    """

    name: str
    data: bytes
    size: tuple[int, int]
    alt: str
    caption: str


def figure(width: float, height: float) -> Any:
    """An empty figure of width x height inches in the report's style, without pyplot's state."""
    from matplotlib.figure import Figure

    with style():
        return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def picture(made: Any, name: str, alt: str, caption: str) -> Picture:
    """The figure as a PNG, equal bytes for equal figures."""
    buffer = io.BytesIO()
    with style():
        made.savefig(buffer, format="png", metadata={"Software": None})
    width, height = (round(SHOWN * inches) for inches in made.get_size_inches())
    return Picture(name, buffer.getvalue(), (width, height), alt, caption)


def style() -> Any:
    """A context in which axes and texts are made in the report's style."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def logarithmic(axes: Any, side: Literal["x", "y"], low: float, high: float) -> None:
    """Make an axis logarithmic, its few ticks plain numbers; nothing where the span is small."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if high / low <= LOG_SPAN:
        return
    axes.set(**{f"{side}scale": "log"})
    axis = axes.xaxis if side == "x" else axes.yaxis
    subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def clipped(text: str, length: int) -> str:
    """Text of a record as a label of at most so many characters; control characters escaped."""
    shown = one_line(text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def number(value: float) -> str:
    """Three figures, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
