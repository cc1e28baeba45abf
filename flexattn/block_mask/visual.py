"""visualize(): a mod as a picture, from its expression, for lengths whose square fits nowhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.block_mask.classify import FULL, PARTIAL, block_kinds
from flexattn.errors import InputError, UnsupportedError
from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import Bound, bind
from flexattn.mods.algebra import bounds_of, tables_of, verdicts
from flexattn.mods.expr import pretty
from flexattn.mods.path import role_of
from flexattn.util.ambient import without_modes

_SHADES = " ░▒▓█"
_WIDTH, _HEIGHT = 64, 32
_COLORS = ("#f2f2f2", "#f0a848", "#3b6ea5")  # empty, partial, full: as the demo draws blocks
_CLASSES = ("empty", "partial", "full")


@dataclass(frozen=True, eq=False)
class Picture:
    """The result of `visualize`.

    share: of a mask, how much of each cell is kept, 0 to 1, float32 [rows, columns]. classes: 0
    empty, 1 partial, 2 full, of per_cell x per_cell blocks each. scores: of a score_mod, its value
    in the middle of each cell. text: the expression. Rows are queries, columns are keys.
    """

    name: str
    lengths: tuple[int, int]
    block: tuple[int, int]
    text: str
    share: Tensor | None = None
    classes: Tensor | None = None
    per_cell: int = 1
    scores: Tensor | None = None

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
        panels = 1 + (self.classes is not None)
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
        """The picture that a notebook shows; None without matplotlib: it then shows characters."""
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


# Places of a cell that are looked at where its bounds leave it open: so many rows, and keys.
_LOOKS = 8
Ends = tuple[Tensor, Tensor]


@without_modes()
def visualize(
    mod: Callable[..., Any] | BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    block_size: int | tuple[int, int] = 128,
    cells: int = 128,
    score: float = 0.0,
) -> Picture:
    """A picture of a mask_mod, a score_mod or a BlockMask, of lengths up to 2**26.

    A notebook shows it, print() writes it with characters, and `save` makes a file (matplotlib).
    The square is cut into at most cells x cells parts. A part is decided by the bounds of the
    mask over it (flexattn.mods.algebra), and an open one by 8 x 8 of its elements, so time and
    memory follow the number of cells and not that of positions. Classes are exact where there are
    no more blocks than cells; else a cell stands for several blocks.

    Args:
        mod: a mod, or a BlockMask, which brings its lengths and block size.
        q_len: the number of queries.
        kv_len: the number of keys; as many as queries by default.
        b: the batch that is shown.
        h: the head that is shown.
        block_size: of the blocks, one number or (query rows, keys).
        cells: of a side of the picture, at most.
        score: what a score_mod is given; its value in the middle of each cell is shown.

    Returns:
        A `Picture`.

    Raises:
        InputError: for lengths that are missing or below 1, for a batch or head below 0, and for
            a mod that takes neither four nor five arguments.
        ModError: for a mod that cannot be read.

    Example::

        print(flexattn.visualize(sliding_window(512), 4096))
    """
    if isinstance(mod, BlockMask):
        q_len, kv_len = (int(length) for length in mod.seq_lengths)
        block_size, mod = mod.BLOCK_SIZE, mod.mask_mod
    kv_len = q_len if kv_len is None else kv_len
    if q_len is None or kv_len is None or min(q_len, kv_len, cells) < 1:
        raise InputError(
            f"q_len={q_len}, kv_len={kv_len}, cells={cells}",
            "a picture needs lengths and cells of at least 1",
            "visualize(mod, q_len, kv_len); kv_len is q_len where it is left out",
        )
    if min(b, h) < 0:
        raise InputError(f"b={b}, h={h}", "they are the batch and the head shown, from 0 on")
    lengths = q_len, kv_len
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    name = str(getattr(mod, "__name__", "") or type(mod).__name__)
    kind = role_of(name, mod)
    bound = bind(mod, kind)
    assert bound is not None
    view = _View(bound, lengths, (b, h))
    rows, columns = (_parts(length, cells) for length in lengths)
    facts: dict[str, Any] = {
        "name": name, "lengths": lengths, "block": block, "text": pretty(bound.mod.expr),
    }  # fmt: skip
    if kind == "score":
        return Picture(**facts, scores=view.scores(rows, columns, score))
    counts = [-(-length // size) for length, size in zip(lengths, block, strict=True)]
    per_cell = -(-max(counts) // cells)
    if per_cell == 1:
        classes = view.blocks(block)
    else:
        tiles = [
            _steps(length, size * per_cell) for length, size in zip(lengths, block, strict=True)
        ]
        share = view.share(*tiles)
        classes = torch.where(share == 1, FULL, torch.where(share == 0, 0, PARTIAL))
    share = view.share(rows, columns)
    return Picture(**facts, share=share, classes=classes, per_cell=per_cell)


class _View:
    """One head of a bound mod."""

    def __init__(self, bound: Bound, lengths: tuple[int, int], place: tuple[int, int]) -> None:
        self._bound, self._lengths, self._place = bound, lengths, place
        self._device = next((t.device for t in bound.tensors if t.dim()), torch.device("cpu"))

    def scores(self, rows: Ends, columns: Ends, score: float) -> Tensor:
        """The score_mod in the middle of each cell: float32 [rows, columns], on the CPU."""
        middles = [(low + high) // 2 for low, high in (rows, columns)]
        found = self._at(middles[0][:, None], middles[1][None, :], score)
        return found.expand(len(middles[0]), len(middles[1])).float().cpu()

    def blocks(self, block: tuple[int, int]) -> Tensor:
        """The kinds of all blocks."""
        b, h = self._place
        kinds = block_kinds(self._bound, (b + 1, h + 1, *self._lengths), block, self._device)
        return kinds[b, h].cpu()

    def share(self, rows: Ends, columns: Ends) -> Tensor:
        """The share of each cell that is kept, an estimate in open cells: float32 [rows, columns].

        0 and 1 in a cell that the bounds decide are exact; an estimate is between the two.
        """
        corners = {
            "q_lo": rows[0][:, None], "q_hi": rows[1][:, None],
            "kv_lo": columns[0][None, :], "kv_hi": columns[1][None, :],
        }  # fmt: skip
        corners = self._env(corners)
        bounds, (_, tensors, scalars) = bounds_of(self._bound.mod), self._bound
        tables = tables_of(bounds.tables, tensors)
        must, may = verdicts(bounds, corners, tensors, scalars, tables)
        shape = len(rows[0]), len(columns[0])
        must, may = must.expand(shape).cpu(), may.expand(shape).cpu()
        share = must.float()
        row, column = torch.nonzero(may & ~must, as_tuple=True)
        if len(row):
            q_idx, kv_idx = (
                _looked(low[at], high[at]) for (low, high), at in ((rows, row), (columns, column))
            )
            kept = self._at(q_idx[:, :, None], kv_idx[:, None, :], 0.0)
            found = kept.expand(len(row), _LOOKS, _LOOKS).float().mean((1, 2)).cpu()
            single = (rows[0] == rows[1])[row] & (columns[0] == columns[1])[column]
            estimate = found.clamp(0.5 / _LOOKS**2, 1 - 0.5 / _LOOKS**2)
            share[row, column] = torch.where(single, found, estimate)
        return share

    def _env(self, env: dict[str, Tensor]) -> dict[str, Tensor]:
        """Variables with those of the head, on the device."""
        env |= {name: torch.tensor(at) for name, at in zip("bh", self._place, strict=True)}
        return {name: each.to(self._device) for name, each in env.items()}

    def _at(self, q_idx: Tensor, kv_idx: Tensor, score: float) -> Tensor:
        given = torch.tensor(score, dtype=torch.float32)
        env = self._env({"q_idx": q_idx, "kv_idx": kv_idx, "score": given})
        return evaluate(self._bound.mod, env, self._bound.tensors, self._bound.scalars)


def _parts(length: int, cells: int) -> Ends:
    """The inclusive ends of at most `cells` parts of nearly one size."""
    count = min(length, cells)
    cuts = torch.arange(count + 1) * length // count
    return cuts[:-1], cuts[1:] - 1


def _steps(length: int, size: int) -> Ends:
    """The inclusive ends of parts of one size; the last one ends with the length."""
    first = torch.arange(0, length, size)
    return first, (first + size).clamp(max=length) - 1


def _looked(low: Tensor, high: Tensor) -> Tensor:
    """Places from the first to the last of each cell: [cells, _LOOKS]."""
    return low[:, None] + (high - low)[:, None] * torch.arange(_LOOKS) // (_LOOKS - 1)
