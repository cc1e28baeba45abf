"""Picture: a mod as a notebook, a file and a terminal show it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError

_SHADES = " ░▒▓█"
_WIDTH, _HEIGHT = 64, 32
_COLORS = ("#f2f2f2", "#f0a848", "#3b6ea5")  # empty, partial, full: as the demo draws blocks
_CLASSES = ("empty", "partial", "full")


@dataclass(frozen=True, eq=False)
class Picture:
    """What `visualize` found.

    share: of a mask, how much of each cell is kept, 0 to 1, float32 [rows, columns]. classes: 0
    empty, 1 partial, 2 full, of per_cell x per_cell blocks each. scores: of a score_mod, its value
    in the middle of each cell. text: the expression. Rows are queries, columns are keys.
    """

    name: str
    lengths: tuple[int, int]
    block: tuple[int, int]
    text: str
    share: Tensor | None
    classes: Tensor | None
    per_cell: int
    scores: Tensor | None

    def __str__(self) -> str:
        """Characters, darker where more is kept or the score is higher, and what was counted."""
        lines = [f"{self.name}: {self.lengths[0]} queries x {self.lengths[1]} keys"]
        if self.share is not None:
            drawn, note = self.share, f"{self.kept:.1%} kept"
        else:
            assert self.scores is not None
            drawn, note = _scaled(self.scores), self._range()
        edge = "─" * min(_WIDTH, drawn.shape[1])
        lines += [f"┌{edge}┐", *(f"│{row}│" for row in _shaded(drawn)), f"└{edge}┘", note]
        if self.classes is not None:
            lines.append(f"{self._unit()}: {', '.join(self._counts())}")
        return "\n".join(lines)

    @property
    def kept(self) -> float:
        """The share of all positions that a mask keeps; an estimate where cells are open."""
        assert self.share is not None, "a score_mod keeps everything"
        rows, columns = (
            torch.diff(torch.arange(n + 1, device="cpu") * length // n).double()
            for n, length in zip(self.share.shape, self.lengths, strict=True)
        )
        weights = rows[:, None] * columns
        return float((self.share * weights).sum() / weights.sum())

    def figure(self) -> Any:
        """A matplotlib Figure: the mask beside the classes of its blocks, or the score.

        Raises UnsupportedError where matplotlib is not installed.
        """
        try:
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise UnsupportedError(
                "a figure without matplotlib",
                "matplotlib draws what is saved and what a notebook shows",
                "pip install 'flexattn[viz]'; print(picture) draws with characters",
            ) from error
        panels = 2 if self.classes is not None else 1
        figure = Figure(figsize=(5.4 * panels, 5.0), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        extent = (0, self.lengths[1], self.lengths[0], 0)
        style: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "nearest"}
        if self.scores is not None:
            finite = self.scores.masked_fill(~self.scores.isfinite(), torch.nan)
            drawn = axes[0].imshow(finite.numpy(), cmap="viridis", **style)
            figure.colorbar(drawn, ax=axes[0], shrink=0.8)
            axes[0].set(title=f"{self.name}: score, {self._range()}")
        if self.share is not None and self.classes is not None:
            axes[0].imshow(self.share.numpy(), cmap="Greys", vmin=0, vmax=1, **style)
            axes[0].set(title=f"{self.name}: {self.kept:.1%} kept")
            # The last block may end past the length.
            sizes = [n * size * self.per_cell for n, size in zip(
                self.classes.shape, self.block, strict=True
            )]  # fmt: skip
            style["extent"] = (0, sizes[1], sizes[0], 0)
            colors = ListedColormap(_COLORS)
            axes[1].imshow(self.classes.numpy(), cmap=colors, vmin=0, vmax=2, **style)
            handles = [
                Patch(facecolor=color, edgecolor="grey", label=label)
                for color, label in zip(_COLORS, self._counts(), strict=True)
            ]
            axes[1].legend(handles=handles, loc="upper right")
            axes[1].set(title=self._unit())
        for each in axes:
            each.set(xlabel="key", ylabel="query")
        return figure

    def save(self, path: Path | str) -> Path:
        """Write the figure in the format that the path's suffix names."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.figure().savefig(path, dpi=120)
        return path

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows; it falls back on characters without matplotlib."""
        try:
            figure = self.figure()
        except UnsupportedError:
            return None
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=96)
        return written.getvalue()

    def __repr__(self) -> str:
        return str(self)

    def _unit(self) -> str:
        name = f"blocks of {self.block[0]} x {self.block[1]}"
        return name if self.per_cell == 1 else f"{self.per_cell} x {self.per_cell} {name}"

    def _counts(self) -> list[str]:
        assert self.classes is not None
        total = max(1, self.classes.numel())
        return [
            f"{name} {int((self.classes == kind).sum()) / total:.1%}"
            for kind, name in enumerate(_CLASSES)
        ]

    def _range(self) -> str:
        assert self.scores is not None
        finite = self.scores[self.scores.isfinite()]
        removed = int((self.scores == -torch.inf).sum()) / self.scores.numel()
        ends = f"{finite.min():.4g} to {finite.max():.4g}" if len(finite) else "nothing finite"
        return f"{ends}, {removed:.1%} removed" if removed else ends


def _scaled(scores: Tensor) -> Tensor:
    """Finite scores from just above 0 to 1, all others 0."""
    finite = scores.isfinite()
    if not finite.any():
        return torch.zeros_like(scores)
    low, high = scores[finite].min(), scores[finite].max()
    span = (high - low).clamp(min=1e-30)
    return torch.where(finite, 0.2 + 0.8 * (scores - low) / span, 0.0)


def _shaded(values: Tensor) -> list[str]:
    """Values from 0 to 1 as rows of characters; only 0 is blank and only 1 is solid."""
    shape = min(values.shape[0], _HEIGHT), min(values.shape[1], _WIDTH)
    small = torch.nn.functional.adaptive_avg_pool2d(values[None, None].float(), shape)[0, 0]
    inner = 1 + (small * (len(_SHADES) - 2)).long().clamp(max=len(_SHADES) - 3)
    last = len(_SHADES) - 1
    shades = torch.where(small <= 0, 0, torch.where(small >= 1, last, inner))
    return ["".join(_SHADES[shade] for shade in row) for row in shades.tolist()]
