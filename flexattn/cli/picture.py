"""Pictures of the demo: the blocks of a mask, and bars of times or of resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexattn.block_mask.visual import Picture, visualize
from flexattn.cli.workloads import DemoWorkload

_RIVAL, _OURS = "#f0a848", "#3b6ea5"
# Cells of a mask on a terminal, and characters of its longest bar.
CELLS, LONGEST = 64, 40


def window(workloads: Sequence[DemoWorkload]) -> Picture:
    """The blocks of the first sliding window among the workloads."""
    workload = next(each for each in workloads if each.window)
    mask = workload.mask_mod()
    assert mask is not None
    return visualize(mask, workload.q_len, workload.kv_len, cells=CELLS)


def text_bars(groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """The same as `bars` in characters, the longest bar of each group equally long."""
    lines = []
    for title, values in groups.items():
        lines.append(title)
        width = max(map(len, values), default=0)
        for label, value in values.items():
            drawn = "█" * max(1, round(LONGEST * value / max(values.values())))
            lines.append(f"  {label:<{width}}  {drawn} {value:.4g} {unit}")
    return "\n".join(lines)


def bars(groups: Mapping[str, Mapping[str, float]], unit: str, path: Path) -> list[Path]:
    """A file: a panel a group, a bar a label, torch's in another color; [] where no value is."""
    groups = {title: values for title, values in groups.items() if values}
    if not groups:
        return []
    figure, panels = _figure(1.0 + 0.34 * sum(2 + len(g) for g in groups.values()), groups)
    for axes, (title, values) in zip(panels, groups.items(), strict=True):
        labels = list(values)
        colors = [_RIVAL if label.startswith("torch") else _OURS for label in labels]
        drawn = axes.barh(labels, list(values.values()), color=colors)
        axes.bar_label(drawn, fmt="%.4g", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=unit)
    return [_save(figure, path)]


def _figure(height: float, groups: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    ratios = [2 + len(values) for values in groups.values()]
    return figure, figure.subplots(len(groups), squeeze=False, height_ratios=ratios)[:, 0]


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
