"""`flexattn demo`: attention of real models, judged, and timed where there is a GPU.

Without one, a child process interprets the kernels, and others compile them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from flexattn.cli import options as asking
from flexattn.cli.bench import (
    TORCH,
    Benched,
    RivalChoice,
    RowInputs,
    print_rows,
    race_call,
    results_of,
)
from flexattn.cli.offline import nearest
from flexattn.cli.selection import writable
from flexattn.cli.terminal import table_of, tell
from flexattn.cli.watch import Watch
from flexattn.cli.workloads import (
    FULL_WORKLOADS,
    PATIENCE,
    SMALL_WORKLOADS,
    DemoTrial,
    DemoWorkload,
    print_notes,
    run_trial,
    verdict_table,
    window,
)
from flexattn.device import detect, named
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import short
from flexattn.records.record import Failed
from flexattn.records.store import Store
from flexattn.report.page import write_page
from flexattn.settings import child_environment, current, override
from flexattn.tuning.builds import BuiltConfig, Pool, build_all, compilers
from flexattn.tuning.campaign import Campaign
from flexattn.tuning.evaluator import Method, method_for
from flexattn.tuning.tasks import task_of, tasks
from flexattn.tuning.tuner import GpuTuner


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
            done.append(race_call(RowInputs.of(workload.row(), where), _ROUNDS, MIN_MS, rival))
    name = torch.cuda.get_device_name() if where.type == "cuda" else device
    print_rows(done)
    drawn = window(workloads).save(out / "mask.png")
    page = write_page((), out, [results_of(done, name)]).page
    tell(console, f"Records: {store.root}. Picture: {drawn}. Chart: {page}")
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
        GpuTuner(method, pool, watch.lane(), gpu=where.index or 0) as tuner,
    ):
        failed = 0
        for outcome in Campaign(todo, store, [tuner.tune]):
            if outcome.status == "failed":
                failed += 1
                watch.finished(f"{outcome.title}: {outcome.message}")
            else:
                watch.finished(f"{outcome.title}: {outcome.status} in {outcome.seconds:.0f} s")
    return failed


def show_cpu(console: Console, out: Path) -> bool:
    """Run both parts, print their tables, a picture and what was shown; whether all went well."""
    doing = console.status("interpreting small shapes, compiling the full ones")
    with doing, ThreadPoolExecutor(1) as pool:
        interpreting = pool.submit(interpreted)
        built = compile_workloads()
        trials, failure = interpreting.result()
    console.print(verdict_table(trials, "Run by Triton's interpreter: float16, small shapes"))
    print_notes(console, trials)
    console.print(_built(built))
    for name, each in built:
        if each.failed is not None:
            tell(console, f"{name}, {short(each.config)}: {each.failed.message}")
    if failure:
        tell(console, failure, "red")
    drawn = window(FULL_WORKLOADS)
    tell(console, str(drawn))
    tell(console, f"Picture: {drawn.save(out / 'mask.png')}")
    complete = not failure and len(trials) == len(SMALL_WORKLOADS)
    passed = complete and all(trial.passed for trial in trials)
    if passed:
        for sentence in cpu_sentences(trials, built):
            tell(console, sentence)
    return passed


def cpu_sentences(
    trials: Sequence[DemoTrial], built: Sequence[tuple[str, BuiltConfig]]
) -> tuple[str, str, str]:
    """The results without a GPU in three sentences: the error, the compiles, and no times."""
    used = max(trial.error / trial.budget for trial in trials)
    sound = [each for _, each in built if each.failed is None]
    spills = sum(each.spills for each in sound)
    return (
        "1. The attention of Llama-3 and Gemma-2, whose masks and softcap are a few lines of "
        f"Python, ran in Triton's interpreter and is right: its error against float64 is at most "
        f"{used:.0%} of what is allowed.",
        f"2. Its kernels for an NVIDIA H200 compiled here without one, {len(sound)} of them, with "
        f"{spills or 'no'} register spills.",
        "3. Torch sees no GPU here, so no kernel, ours or torch's, was timed; on a machine with "
        "one the same command times both.",
    )


def _built(built: Sequence[tuple[str, BuiltConfig]]) -> Table:
    title = f"Compiled for {DEMO_DEVICE}, without one: bfloat16, full shapes"
    headings = ">registers", ">spills", ">shared KiB", ">mma"
    table = table_of("workload", "config", *headings, title=title)
    for name, each in built:
        shared = f"{each.shared_memory / 1024:.0f}"
        numbers = [str(each.registers), str(each.spills), shared, str(each.matrix_instructions)]
        table.add_row(name, short(each.config), *(numbers if each.code else ["-"] * 4))
    return table


DEMO_DEVICE = "nvidia-h200"
CONFIGS = 3
_DEADLINE = 300.0


def compile_workloads() -> list[tuple[str, BuiltConfig]]:
    """A small space of each workload, by its name, compiled for a device that need not be here."""
    device, found = named(DEMO_DEVICE), []
    begin = time.perf_counter()
    with compilers() as pool:
        for workload in FULL_WORKLOADS:
            problem = task_of(workload.row(), device, torch.device("cpu")).problem
            limit = 1 if time.perf_counter() - begin > PATIENCE else CONFIGS
            configs = [*nearest(problem, device, default(problem, device), limit)]
            built = build_all(problem, configs, device, pool=pool)
            found += [(workload.name, each) for each in built]
    return found


def interpreted() -> tuple[list[DemoTrial], str]:
    """The trials of a process that interprets, and what became of the others, in words."""
    environment = partial(child_environment, interpret=True)
    with Pool(run_trial, 1, _DEADLINE, environment) as pool:
        found = dict(pool.run(SMALL_WORKLOADS))
    lost = [f"interpreting: {each}" for each in found.values() if isinstance(each, Failed)]
    trials = [found[i] for i in sorted(found) if isinstance(found[i], DemoTrial)]
    return trials, "\n".join(lost)
