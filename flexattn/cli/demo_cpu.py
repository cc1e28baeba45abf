"""The demo without a GPU: verdicts of interpreted kernels, and what compiled ones take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flexattn.cli import parts, picture
from flexattn.cli.parts import CompiledWorkload, Parts
from flexattn.cli.terminal import tell
from flexattn.cli.workloads import (
    FULL_WORKLOADS,
    SMALL_WORKLOADS,
    print_notes,
    verdict_cells,
    verdict_table,
)

_MISSING = (
    "Torch sees no GPU here, so no kernel, ours or torch's, was timed; on a machine with one the "
    "same command times both."
)


def show_cpu(console: Console, out: Path) -> bool:
    """Run both parts, print their tables, a picture and what was shown; whether all went well."""
    with console.status("interpreting small shapes, compiling the full ones"):
        found = parts.run_both()
    table = verdict_table("Run by Triton's interpreter: float16, small shapes")
    for trial in found.trials:
        seen = (trial.workload, trial.shape, trial.error, trial.budget, trial.passed)
        table.add_row(*verdict_cells(*seen))
    console.print(table)
    print_notes(console, found.trials)
    console.print(_built(found.compiled))
    for each in found.compiled:
        if each.note:
            tell(console, f"{each.workload}, {each.config}: {each.note}")
    for failure in found.failures:
        tell(console, failure, "red")
    drawn = picture.window(FULL_WORKLOADS)
    tell(console, str(drawn))
    tell(console, f"Picture: {drawn.save(out / 'mask.png')}")
    complete = not found.failures and len(found.trials) == len(SMALL_WORKLOADS)
    passed = complete and all(trial.passed for trial in found.trials)
    if passed:
        for sentence in cpu_sentences(found):
            tell(console, sentence)
    return passed


def cpu_sentences(found: Parts) -> tuple[str, str, str]:
    """What somebody may repeat: how exact, what compiles, and what nobody has timed."""
    used = max(trial.error / trial.budget for trial in found.trials)
    built = [each for each in found.compiled if not each.note]
    spills = sum(each.spills for each in built)
    return (
        "1. The attention of Llama-3 and Gemma-2, whose masks and softcap are a few lines of "
        f"Python, ran in Triton's interpreter and is right: its error against float64 is at most "
        f"{used:.0%} of what is allowed.",
        f"2. Its kernels for an NVIDIA H200 compiled here without one, {len(built)} of them, with "
        f"{spills or 'no'} register spills.",
        f"3. {_MISSING}",
    )


def _built(compiled: Sequence[CompiledWorkload]) -> Table:
    table = Table(title=f"Compiled for {parts.DEMO_DEVICE}, without one: bfloat16, full shapes")
    table.add_column("workload", no_wrap=True)
    table.add_column("config", overflow="fold")
    for name in ("registers", "spills", "shared KiB", "mma"):
        table.add_column(name, justify="right")
    for each in compiled:
        shared = f"{each.shared / 1024:.0f}"
        numbers = [str(each.registers), str(each.spills), shared, str(each.matrix_instructions)]
        table.add_row(each.workload, each.config, *(["-"] * 4 if each.note else numbers))
    return table
