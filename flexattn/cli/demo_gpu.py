"""The demo on a GPU: a small space of each workload tuned, then raced with torch's kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flexattn.cli import picture
from flexattn.cli.bench import DEFAULT, OURS, TORCH, Benched, RivalChoice, race_row
from flexattn.cli.terminal import cell, tell
from flexattn.cli.watch import Watch
from flexattn.cli.workloads import FULL_WORKLOADS, DemoWorkload, verdict_cells, verdict_table
from flexattn.device import detect
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tune.builds import compilers
from flexattn.tune.campaign import Campaign
from flexattn.tune.method import Method, method_for
from flexattn.tune.tasks import tasks
from flexattn.tune.tuner import GpuTuner

METHOD = method_for("quick", 3.0)
_ROUNDS, MIN_MS = 10, 4.0


def show_gpu(
    console: Console,
    out: Path,
    workloads: Sequence[DemoWorkload] = FULL_WORKLOADS,
    device: str = "cuda",
    rival: RivalChoice = "compiled",
    method: Method = METHOD,
) -> bool:
    """Tune into `out`, run as dispatch then serves, print the table, draw the pictures.

    Whether every workload was tuned and every gate is green; a second run keeps the records.
    """
    where = torch.empty(0, device=device).device  # "cuda" with its index
    store = Store(out / "records")
    failed = _tune(store, workloads, where, method, console)
    with override(cache=(store.root,), mode="replay"), console.status("racing") as status:
        done = []
        for workload in workloads:
            status.update(f"{workload.name}: torch compiles its kernel, then the race")
            done.append(race_row(workload.row(), where, _ROUNDS, MIN_MS, rival))
    name = torch.cuda.get_device_name() if where.type == "cuda" else device
    gates = verdict_table(f"Run on {name} in bfloat16, against the float64 oracle")
    for workload, row in zip(workloads, done, strict=True):
        seen = (workload.name, workload.describe(), row.error, row.budget, row.passed)
        gates.add_row(*verdict_cells(*seen))
    console.print(gates)
    console.print(_raced(done))
    for row in done:
        if row.note:
            tell(console, f"{row.title}: {row.note}", "" if row.passed else "red")
    times = {row.title: _times(row) for row in done}
    drawn = [picture.window(workloads).save(out / "mask.png")]
    drawn += picture.bars(times, "microseconds", out / "timings.png")
    tell(console, picture.text_bars(times, "µs"))
    tell(console, f"Records: {store.root}. Pictures: " + ", ".join(map(str, drawn)))
    passed = not failed and all(row.passed for row in done)
    if passed:
        for sentence in gpu_sentences(done, name):
            tell(console, sentence)
    return passed


def gpu_sentences(done: Sequence[Benched], name: str) -> tuple[str, str, str]:
    """What somebody may repeat: how fast, how exact, and from what."""
    ratios = [(row.title, ratio) for row in done if (ratio := row.ratio.get(TORCH)) is not None]
    told = ", ".join(f"{ratio:.2f} times for {title}" for title, ratio in ratios)
    beside = (
        f"times of torch's compiled flex_attention over ours: {told}"
        if told
        else ("torch's kernel was not timed beside ours")
    )
    used = max(row.error / row.budget for row in done)
    return (
        f"1. On {name}, {beside}.",
        "2. Every output is right: its error against float64 is at most "
        f"{used:.0%} of what is allowed.",
        "3. Masks and softcap are a few lines of Python each; the kernels were written from them "
        "and tuned for this device.",
    )


def _raced(done: Sequence[Benched]) -> Table:
    table = Table(title="Median microseconds of one race a workload")
    table.add_column("workload", no_wrap=True)
    for column in (TORCH, DEFAULT, "tuned", f"{TORCH}/tuned"):
        table.add_column(column, justify="right")
    table.add_column("tuned config")
    for row in done:
        times = (_number(row.us.get(each)) for each in (TORCH, DEFAULT, OURS))
        ratio = row.ratio.get(TORCH)
        table.add_row(
            cell(row.title), *times, "-" if ratio is None else f"{ratio:.2f}x", row.config
        )
    return table


def _tune(
    store: Store,
    workloads: Sequence[DemoWorkload],
    where: torch.device,
    method: Method,
    console: Console,
) -> int:
    """Tune what the store lacks; how many workloads failed."""
    todo = list(tasks((workload.row() for workload in workloads), detect(where), where))
    with (
        Watch(len(todo), console) as watch,
        compilers() as pool,
        GpuTuner(method, pool, None, watch.lane(), gpu=where.index or 0) as tuner,
    ):
        failed = 0
        for outcome in Campaign(todo, store, [tuner.tune]):
            if outcome.status == "failed":
                failed += 1
                watch.finished(f"{outcome.title}: {outcome.message}")
            else:
                watch.finished(f"{outcome.title}: {outcome.status} in {outcome.seconds:.0f} s")
    return failed


def _times(row: Benched) -> dict[str, float]:
    labels = {TORCH: "torch, compiled", DEFAULT: "static default", OURS: f"tuned: {row.config}"}
    return {label: us for name, label in labels.items() if (us := row.us.get(name)) is not None}


def _number(us: float | None) -> str:
    return "-" if us is None or math.isnan(us) else f"{us:.1f}"
