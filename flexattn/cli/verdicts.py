"""The part of the demo's tables that says what was run and what the accuracy gate found."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from flexattn.cli.terminal import tell
from flexattn.cli.trial import DemoTrial


def table(title: str) -> Table:
    """A table whose first columns are those of `cells`."""
    found = Table(title=title)
    found.add_column("workload", no_wrap=True)
    found.add_column("shape")
    for name in ("max error", "budget"):
        found.add_column(name, justify="right")
    found.add_column("gate")
    return found


def cells(name: str, shape: str, error: float, budget: float, passed: bool) -> tuple[str, ...]:
    """Name, shape, error, budget and verdict of a workload."""
    verdict = "[green]passed" if passed else "[red]FAILED"
    return name, shape, f"{error:.1e}", f"{budget:.1e}", verdict


def print_notes(console: Console, trials: Iterable[DemoTrial]) -> None:
    """Why a variant has no time: its gate's report, or what the device lacks."""
    for trial in trials:
        for variant in trial.variants:
            if variant.note:
                text = f"{trial.workload}, {variant.config}: {variant.note}"
                tell(console, text, "" if variant.passed else "red")
