"""`flexattn demo`: attention of real models, judged, and timed where there is a GPU.

Without one, a child process interprets the kernels, and another compiles them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flexattn.cli import options as asking
from flexattn.cli.bench import DEFAULT, OURS, TORCH, Benched, RivalChoice, race_row
from flexattn.cli.offline import compiled, nearest
from flexattn.cli.selection import writable
from flexattn.cli.terminal import cell, tell
from flexattn.cli.watch import Watch
from flexattn.cli.workloads import (
    FULL_WORKLOADS,
    SMALL_WORKLOADS,
    DemoTrial,
    DemoVariant,
    DemoWorkload,
    bars,
    print_notes,
    run_trial,
    text_bars,
    verdict_cells,
    verdict_table,
    window,
)
from flexattn.device import Device, detect, named
from flexattn.errors import BuildError, ConfigError
from flexattn.kernels.base.config import Config
from flexattn.kernels.choose import options
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import family_of, short
from flexattn.problem import Problem
from flexattn.records.store import Store
from flexattn.runtime.resources import resources
from flexattn.settings import child_environment, current, override
from flexattn.tune.builds import compilers
from flexattn.tune.campaign import Campaign
from flexattn.tune.subject import Method, method_for
from flexattn.tune.tasks import task_of, tasks
from flexattn.tune.tuner import GpuTuner


def run(args: asking.Demo) -> None:
    """Run `flexattn demo`."""
    console, out = Console(), writable(args.out)
    on_gpu = torch.cuda.is_available() and not current().interpret
    passed = show_gpu(console, out) if on_gpu else show_cpu(console, out)
    if not passed:
        console.print("[red]The demo failed: see above.")
        raise typer.Exit(1)


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
    drawn = [window(workloads).save(out / "mask.png")]
    drawn += bars(times, "microseconds", out / "timings.png")
    tell(console, text_bars(times, "µs"))
    tell(console, f"Records: {store.root}. Pictures: " + ", ".join(map(str, drawn)))
    passed = not failed and all(row.passed for row in done)
    if passed:
        for sentence in gpu_sentences(done, name):
            tell(console, sentence)
    return passed


def gpu_sentences(done: Sequence[Benched], name: str) -> tuple[str, str, str]:
    """The demo's results in three sentences: the speed, the error, and the config's source."""
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


def show_cpu(console: Console, out: Path) -> bool:
    """Run both parts, print their tables, a picture and what was shown; whether all went well."""
    with console.status("interpreting small shapes, compiling the full ones"):
        found = run_both()
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
    drawn = window(FULL_WORKLOADS)
    tell(console, str(drawn))
    tell(console, f"Picture: {drawn.save(out / 'mask.png')}")
    complete = not found.failures and len(found.trials) == len(SMALL_WORKLOADS)
    passed = complete and all(trial.passed for trial in found.trials)
    if passed:
        for sentence in cpu_sentences(found):
            tell(console, sentence)
    return passed


def cpu_sentences(found: Parts) -> tuple[str, str, str]:
    """The results without a GPU in three sentences: the error, the compiles, and no times."""
    used = max(trial.error / trial.budget for trial in found.trials)
    built = [each for each in found.compiled if not each.note]
    spills = sum(each.spills for each in built)
    return (
        "1. The attention of Llama-3 and Gemma-2, whose masks and softcap are a few lines of "
        f"Python, ran in Triton's interpreter and is right: its error against float64 is at most "
        f"{used:.0%} of what is allowed.",
        f"2. Its kernels for an NVIDIA H200 compiled here without one, {len(built)} of them, with "
        f"{spills or 'no'} register spills.",
        "3. Torch sees no GPU here, so no kernel, ours or torch's, was timed; on a machine with "
        "one the same command times both.",
    )


def _built(compiled: Sequence[CompiledWorkload]) -> Table:
    table = Table(title=f"Compiled for {DEMO_DEVICE}, without one: bfloat16, full shapes")
    table.add_column("workload", no_wrap=True)
    table.add_column("config", overflow="fold")
    for name in ("registers", "spills", "shared KiB", "mma"):
        table.add_column(name, justify="right")
    for each in compiled:
        shared = f"{each.shared / 1024:.0f}"
        numbers = [str(each.registers), str(each.spills), shared, str(each.matrix_instructions)]
        table.add_row(each.workload, each.config, *(["-"] * 4 if each.note else numbers))
    return table


DEMO_DEVICE = "nvidia-h200"
INTERPRETED = 2
CONFIGS = 3
PATIENCE = 20.0  # seconds after which a workload gets its first config alone
_DEADLINE = 300


@dataclass(frozen=True)
class CompiledWorkload:
    """The Resources of a config's kernel on its device, or the reason why it does not compile."""

    workload: str
    config: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    matrix_instructions: int = 0
    note: str = ""


@dataclass(frozen=True)
class Parts:
    """The results of both child processes; `failures`: the last lines of one that failed."""

    trials: tuple[DemoTrial, ...]
    compiled: tuple[CompiledWorkload, ...]
    failures: tuple[str, ...]


def interpret_workloads() -> str:
    """Run the rendered kernels in Triton's interpreter and judge them; a line of JSON."""
    trials = [run_trial(w, "float16", INTERPRETED, PATIENCE) for w in SMALL_WORKLOADS]
    return json.dumps([asdict(trial) for trial in trials])


def compile_all() -> str:
    """Compile a small space of each workload for a device that need not be here; JSON again."""
    device = named(DEMO_DEVICE)
    begin = time.perf_counter()
    found = []
    for workload in FULL_WORKLOADS:
        problem = task_of(workload.row(), device, torch.device("cpu")).problem
        first = default(problem, device)
        for config in nearest(problem, device, first, CONFIGS):
            if config != first and time.perf_counter() - begin > PATIENCE:
                break
            found.append(asdict(_compiled(workload.name, problem, device, config)))
    return json.dumps(found)


def _compiled(name: str, problem: Problem, device: Device, config: Config) -> CompiledWorkload:
    try:
        forced = options.parse(family_of(config).options_of(config))
        kernel = compiled(problem, device, forced)[1]
    except (BuildError, ConfigError) as error:
        return CompiledWorkload(name, short(config), note=error.got)
    taken = resources(kernel, device)
    return CompiledWorkload(
        name,
        short(config),
        taken.registers,
        taken.spills,
        taken.shared,
        taken.matrix_instructions,
    )


def run_both() -> Parts:
    """Both parts at once, each in a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        (trials, first), (built, second) = pool.map(_child, (interpret_workloads, compile_all))
    return Parts(
        tuple(_trial(each) for each in trials),
        tuple(CompiledWorkload(**each) for each in built),
        tuple(text for text in (first, second) if text),
    )


def _child(part: Callable[[], str]) -> tuple[list[dict[str, Any]], str]:
    name = part.__name__
    code = f"import sys; from flexattn.cli.demo import {name}; sys.stdout.write({name}())"
    environment = child_environment(interpret=part is interpret_workloads)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            timeout=_DEADLINE, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"{name}: no answer within {_DEADLINE} s"
    if done.returncode:
        words = done.stderr.strip().splitlines()[-8:]
        return [], f"{name}: status {done.returncode}\n" + "\n".join(words)
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found, ""


def _trial(fields: dict[str, Any]) -> DemoTrial:
    variants = tuple(DemoVariant(**each) for each in fields["variants"])
    return DemoTrial(**{**fields, "variants": variants})
