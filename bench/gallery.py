"""docs/gallery.md: each mod of flexattn.catalogue from its docstring, with picture and speed."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.drawing import cells, curve
from flexattn import catalogue
from flexattn.block_mask.visual import visualize

GROUPS: dict[str, str] = {
    "Positions": "causal causal_offset sliding_window dilated_window head_windows prefix_lm",
    "Packed and padded batches": "document document_offsets padding",
    "Structure": "natten_2d sliding_tile_3d flamingo transfusion tree block_table",
    "Scores": "softcap alibi relative_bias t5_bias head_bias length_temperature scaled",
}
# The row of h200-prefill-torch.json that has the mod; scores are causal there.
RACES: dict[str, str] = {
    "causal": "d128-16k-causal",
    "sliding_window": "d128-8k-window",
    "document": "d128-8k-documents",
    "softcap": "d128-8k-softcap",
    "alibi": "d128-8k-alibi",
    "relative_bias": "d128-8k-relative",
}
# Queries and keys of a picture, where 2048 squared would not show the idea.
SIZES: dict[str, tuple[int, int]] = {
    "causal_offset": (512, 2048),
    "natten_2d": (2025, 2025),
    "tree": (16, 32),
}
# Scores that read no position are drawn as curves.
CURVES = ("softcap", "scaled")


@dataclass(frozen=True)
class Entry:
    """A mod as its docstring tells it: a sentence, a paragraph, lines that make one, its paper."""

    name: str
    sentence: str
    paragraph: str
    line: str
    source: str

    def mod(self) -> Callable[..., Any]:
        """The mod that the lines make."""
        scope: dict[str, Any] = {"torch": torch, **vars(catalogue)}
        exec(self.line, scope)
        return scope["mask_mod"] if "mask_mod" in scope else scope["score_mod"]


def entry(name: str) -> Entry:
    """One mod of the catalogue. Raises ValueError where its docstring lacks a part."""
    text = inspect.getdoc(getattr(catalogue, name)) or ""
    parts = text.split("\n\n")
    lines = [part for part in parts if part.startswith("    ")]
    if len(parts) < 4 or len(lines) != 1 or not parts[-1].startswith("Source: "):
        raise ValueError(f"{name}: a sentence, a paragraph, lines that make one, Source: a paper")
    prose = [part.replace("\n", " ") for part in parts[1:-1] if part not in lines]
    source = parts[-1].removeprefix("Source: ").replace("\n", " ")
    return Entry(name, parts[0], " ".join(prose), textwrap.dedent(lines[0]), source)


def picture(name: str) -> str:
    """The mod as SVG, of the lengths in SIZES."""
    mod, zero = entry(name).mod(), torch.zeros((), dtype=torch.int64)
    if name in CURVES:
        given = torch.linspace(-100, 100, 81)
        got = [float(mod(score, zero, zero, zero, zero)) for score in given]
        return curve(given.tolist(), got)
    rows, columns = SIZES.get(name, (2048, 2048))
    drawn = min(48, rows, columns)
    return cells(visualize(mod, rows, columns, cells=drawn, score=1.0))


def gallery(speed: Callable[[str], str]) -> str:
    """The page's body; `speed` has a sentence for a row of a race."""
    parts = []
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for found in map(entry, names.split()):
            parts += [
                f"### {found.name}",
                f"![{found.name}](pictures/gallery/{found.name}.svg)",
                f"{found.sentence} {found.paragraph}",
                f"```python\n{_imports(found)}\n\n{found.line}\n```",
                f"Source: {found.source}",
            ]
            if found.name in RACES:
                parts.append(speed(RACES[found.name]))
    return "\n\n".join(parts)


def _imports(found: Entry) -> str:
    also = ["document_ids"] if "document_ids(" in found.line else []
    torch_too = "import torch\n" if "torch." in found.line else ""
    return f"{torch_too}from flexattn.catalogue import {', '.join(sorted([found.name, *also]))}"
