"""Pictures of the demo: the blocks of a mask, and bars of times or of resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.classify import block_kinds
from flexattn.cli.workloads import Workload
from flexattn.mods import bind

BLOCK = 128
EMPTY, PARTIAL, FULL = "#f2f2f2", "#f0a848", "#3b6ea5"


def window_blocks(workloads: Sequence[Workload], device: str, path: Path) -> Path:
    """Draw the blocks of the first sliding window among the workloads."""
    workload = next(each for each in workloads if each.window)
    bound = bind(workload.mask_mod(), "mask")
    assert bound is not None
    sizes = (1, 1, workload.q_len, workload.kv_len)
    where = torch.empty(0, device=device).device  # "cuda" with its index
    kinds = block_kinds(bound, sizes, (BLOCK, BLOCK), where)
    title = f"{workload.name}: {workload.q_len} tokens, window {workload.window}"
    return mask_blocks(kinds[0, 0], BLOCK, title, path)


def mask_blocks(kinds: Tensor, block: int, title: str, path: Path) -> Path:
    """Draw kinds int8 [q blocks, kv blocks]: 0 empty, 1 partial, 2 full."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axes = _figure(6.4, 6.0)
    shown = kinds.cpu().numpy()
    axes.imshow(shown, cmap=ListedColormap([EMPTY, PARTIAL, FULL]), vmin=0, vmax=2)
    axes.set(title=title, xlabel=f"keys / {block}", ylabel=f"queries / {block}")
    total = shown.size
    handles = [
        Patch(
            facecolor=color, edgecolor="grey", label=f"{name} {(shown == kind).sum() / total:.0%}"
        )
        for kind, (name, color) in enumerate(
            (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))
        )
    ]
    axes.legend(handles=handles, loc="upper right")
    return _save(figure, path)


def bars(groups: Mapping[str, Mapping[str, float]], unit: str, path: Path) -> list[Path]:
    """One panel a group, one bar a label; torch's bar has another color. Nothing for no value."""
    groups = {title: values for title, values in groups.items() if values}
    if not groups:
        return []
    figure, panels = _figure(7.2, 1.0 + 0.34 * sum(2 + len(g) for g in groups.values()), groups)
    for axes, (title, values) in zip(panels, groups.items(), strict=True):
        labels = list(values)
        colors = [PARTIAL if label.startswith("torch") else FULL for label in labels]
        drawn = axes.barh(labels, list(values.values()), color=colors)
        axes.bar_label(drawn, fmt="%.4g", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=unit)
    return [_save(figure, path)]


def _figure(width: float, height: float, groups: Mapping[str, Any] | None = None) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if groups is None:
        return figure, figure.subplots()
    ratios = [2 + len(values) for values in groups.values()]
    return figure, figure.subplots(len(groups), squeeze=False, height_ratios=ratios)[:, 0]


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
