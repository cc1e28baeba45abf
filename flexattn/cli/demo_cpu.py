"""The demo without a GPU: verdicts of interpreted kernels, and what compiled ones take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flexattn.cli import parts, picture, verdicts
from flexattn.cli.parts import Compiled
from flexattn.cli.terminal import tell
from flexattn.cli.workloads import FULL, SMALL

MISSING = "Not done: torch sees no GPU here, so no kernel, ours or torch's, was timed."


def show(console: Console, out: Path) -> bool:
    """Run both parts, print their tables, draw the pictures; whether all went well."""
    with console.status("interpreting small shapes, compiling the full ones"):
        found = parts.run_both()
        drawn = [picture.window_blocks(FULL, "cpu", out / "mask.png")]
    table = verdicts.table("Run by Triton's interpreter: float16, small shapes")
    for trial in found.trials:
        seen = (trial.workload, trial.shape, trial.error, trial.budget, trial.passed)
        table.add_row(*verdicts.cells(*seen))
    console.print(table)
    verdicts.print_notes(console, found.trials)
    console.print(_built(found.compiled))
    for each in found.compiled:
        if each.note:
            tell(console, f"{each.workload}, {each.config}: {each.note}")
    for failure in found.failures:
        tell(console, failure, "red")
    registers = {
        workload.name: {
            each.config: float(each.registers)
            for each in found.compiled
            if each.workload == workload.name and not each.note
        }
        for workload in FULL
    }
    drawn += picture.bars(registers, "registers of a thread", out / "resources.png")
    tell(console, "Pictures: " + ", ".join(map(str, drawn)))
    console.print(MISSING)
    complete = not found.failures and len(found.trials) == len(SMALL)
    return complete and all(trial.passed for trial in found.trials)


def _built(compiled: Sequence[Compiled]) -> Table:
    table = Table(title=f"Compiled for {parts.DEVICE}, without one: bfloat16, full shapes")
    table.add_column("workload", no_wrap=True)
    table.add_column("config", no_wrap=True)
    for name in ("registers", "spills", "shared KiB", "mma"):
        table.add_column(name, justify="right")
    for each in compiled:
        shared = f"{each.shared / 1024:.0f}"
        numbers = [str(each.registers), str(each.spills), shared, str(each.matrix_instructions)]
        table.add_row(each.workload, each.config, *(["-"] * 4 if each.note else numbers))
    return table
