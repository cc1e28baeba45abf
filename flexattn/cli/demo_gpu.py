"""The demo on a GPU: times beside torch's compiled flex_attention, in one race a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from flexattn.cli import picture, verdicts
from flexattn.cli.trial import TORCH, Effort, Trial, run
from flexattn.cli.workloads import FULL, Workload

EFFORT = Effort(configs=5, seconds=4.0, clock="cuda")


def show(
    console: Console,
    out: Path,
    workloads: Sequence[Workload] = FULL,
    device: str = "cuda",
    effort: Effort = EFFORT,
) -> bool:
    """Run the workloads, print the table, draw the pictures; whether every gate is green."""
    trials = []
    with console.status("starting") as status:
        for workload in workloads:
            trials.append(run(workload, device, torch.bfloat16, effort, status.update))
    where = torch.cuda.get_device_name() if device == "cuda" else device
    table = verdicts.table(f"{where}, bfloat16: median microseconds of one race a workload")
    for name in ("torch", "ours", "torch/ours", "best"):
        table.add_column(name, justify="right")
    table.add_column("best config")
    for trial in trials:
        ours, best = trial.variants[0].us, trial.best
        cells = _number(trial.torch_us), _number(ours), _ratio(trial.torch_us, ours)
        table.add_row(*verdicts.cells(trial), *cells, _number(best.us), best.config)
    console.print(table)
    verdicts.print_notes(console, trials)
    times = {trial.workload: _times(trial) for trial in trials}
    drawn = [picture.window_blocks(workloads, device, out / "mask.png")]
    drawn += picture.bars(times, "microseconds", out / "timings.png")
    console.print("Pictures: " + ", ".join(map(str, drawn)))
    return all(trial.passed for trial in trials)


def _times(trial: Trial) -> dict[str, float]:
    named = {f"{TORCH}, compiled": trial.torch_us}
    named |= {variant.config: variant.us for variant in trial.variants}
    return {label: us for label, us in named.items() if not math.isnan(us)}


def _number(us: float) -> str:
    return "-" if math.isnan(us) else f"{us:.1f}"


def _ratio(theirs: float, ours: float) -> str:
    return "-" if math.isnan(theirs / ours) else f"{theirs / ours:.2f}x"
