"""`flexattn demo`: attention of real models, judged, and timed where there is a GPU.

Without one, a child process interprets the kernels, and others compile them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console

from flexattn.block_mask.visual import visualize
from flexattn.catalogue import sliding_window
from flexattn.cli import options as asking
from flexattn.cli.bench import (
    RivalChoice,
    RowInputs,
    error_of,
    print_rows,
    race_call,
    results_of,
)
from flexattn.cli.selection import writable
from flexattn.cli.terminal import INTERRUPTED, tell
from flexattn.cli.tune import built_line, run_tuning
from flexattn.device import detect, named
from flexattn.frontend.attention import flex_attention
from flexattn.kernels.choose.defaults import survey
from flexattn.problem import Shape
from flexattn.records.record import Failed
from flexattn.records.store import Store
from flexattn.report.page import write_page
from flexattn.settings import child_environment, current, override
from flexattn.tuning.builds import BuiltConfig, Pool, build_all, compilers
from flexattn.tuning.evaluator import Method, method_for
from flexattn.tuning.tasks import task_of, tasks
from flexattn.tuning.workload import ModPath, Row
from flexattn.verify.gate import Verdict


def demo_row(
    name: str,
    heads: tuple[int, int],
    head_dim: int,
    sizes: tuple[int, int, int],
    window: int = 0,
    dtype: str = "bfloat16",
) -> Row:
    """A call, causal if it has many rows; sizes: batch, queries, keys.

    window: keys before the query's own, with a softcap of 50 as Gemma-2 has it; 0 for neither.
    """
    (B, q_len, kv_len), catalogue = sizes, "flexattn.catalogue"
    score = mask = None
    if window:
        score = ModPath(f"{catalogue}:softcap", (50.0,))
        mask = ModPath(f"{catalogue}:sliding_window", (window,))
    elif q_len > 1:
        mask = ModPath(f"{catalogue}:causal")
    shape = Shape(B, *heads, q_len, kv_len, head_dim, head_dim)
    return Row(name, None, dtype, shape, score, mask, (128, 128), None, ())


WINDOW = 4096
FULL_ROWS = (
    demo_row("llama-3 prefill", (32, 8), 128, (1, 8192, 8192)),
    demo_row("gemma-2 prefill", (16, 8), 256, (1, 8192, 8192), WINDOW),
    demo_row("llama-3 decode", (32, 8), 128, (8, 1, 8192)),
)
# Odd lengths: they end where no tile does.
SMALL_ROWS = (
    demo_row("llama-3 prefill", (4, 1), 128, (1, 301, 301), dtype="float16"),
    demo_row("gemma-2 prefill", (4, 2), 256, (1, 333, 333), 160, "float16"),
    demo_row("llama-3 decode", (32, 8), 128, (1, 1, 777), dtype="float16"),
)
DEMO_DEVICE = "nvidia-h200"
METHOD = method_for("quick", 3.0)
# Rounds and milliseconds of a race; configs that are compiled of a call; seconds for one call in
# the interpreter.
_ROUNDS, _MIN_MS, _CONFIGS, _DEADLINE = 10, 4.0, 2, 300.0


def run(args: asking.Demo) -> None:
    """Run `flexattn demo`."""
    console, out = Console(), writable(args.out)
    on_gpu = torch.cuda.is_available() and not current().interpret
    passed = show_gpu(console, out) if on_gpu else show_cpu(console)
    drawn = visualize(sliding_window(WINDOW), 2 * WINDOW, cells=64)
    tell(console, f"{drawn}\nThe mask of gemma-2 prefill: {drawn.save(out / 'mask.png')}")
    if not passed:
        console.print("[red]The demo failed: see above.")
        raise typer.Exit(1)
    tell(console, "The demo passed: each result is as near to float64 as its dtype allows.")


def show_gpu(
    console: Console,
    out: Path,
    rows: Sequence[Row] = FULL_ROWS,
    device: str = "cuda",
    rival: RivalChoice = "compiled",
    method: Method = METHOD,
) -> bool:
    """Tune into `out`, race what dispatch then serves, and write a page with a chart.

    True if every row was tuned and every gate is green; a second run keeps the records.
    """
    where = torch.empty(0, device=device).device  # "cuda" with its index
    store = Store(out / "records")
    found = list(tasks(rows, detect(where), where))
    ran = run_tuning(found, store, method, 0, False, None)
    if ran.interrupted:
        raise typer.Exit(INTERRUPTED)
    with override(cache=(store.root,), mode="replay"), console.status("racing"):
        done = [race_call(RowInputs.of(row, where), _ROUNDS, _MIN_MS, rival) for row in rows]
    name = torch.cuda.get_device_name() if where.type == "cuda" else device
    print_rows(done)
    page = write_page((), out, [results_of(done, name)]).page
    tell(console, f"Records: {store.root}. Chart: {page}")
    tuned = len(ran.outcomes) == len(rows) and all(each.answer for each in ran.outcomes)
    return tuned and all(row.passed for row in done)


def show_cpu(console: Console) -> bool:
    """Interpret small calls, and compile the full ones for an H200; True if all went well."""
    doing = console.status("interpreting small shapes, compiling the full ones")
    with doing, ThreadPoolExecutor(1) as pool:
        interpreting = pool.submit(interpreted)
        built = compile_rows()
        trials = interpreting.result()
    tell(console, "Run by Triton's interpreter, in float16 at small sizes:")
    passed = [isinstance(each, Verdict) and each.passed for each in trials]
    for row, found, good in zip(SMALL_ROWS, trials, passed, strict=False):
        words = f"gate RED: {found}"
        if isinstance(found, Verdict):
            error, budget = error_of(found)
            gate = "green" if good else f"RED: {found.message()}"
            words = f"error {error:.1e} of {budget:.1e}, gate {gate}"
        tell(console, f"  {row.title}: {words}")
    tell(console, f"Compiled for {DEMO_DEVICE} without one, in bfloat16 at full sizes:")
    for title, each in built:
        tell(console, f"  {title}, {built_line(each)}")
    tell(console, "Nothing was timed: torch sees no GPU here.")
    return all(passed)


def compile_rows() -> list[tuple[str, BuiltConfig]]:
    """A few configs of each full row by its title, for a device that need not be here."""
    device, found = named(DEMO_DEVICE), []
    with compilers() as pool:
        for row in FULL_ROWS:
            problem = task_of(row, device, torch.device("cpu")).problem
            configs = survey(problem, device, "quick").configs[:_CONFIGS]
            found += [(row.title, each) for each in build_all(problem, configs, device, pool=pool)]
    return found


def run_trial(row: Row) -> Verdict:
    """Run a row's rendered kernel on CPU tensors, and judge it."""
    x = RowInputs.of(row, torch.device("cpu"))
    with torch.no_grad():
        out = flex_attention(
            x.q, x.k, x.v, score_mod=x.score_mod, block_mask=x.block_mask, enable_gqa=True
        )
        return x.judge()((out, None, None))


def interpreted() -> list[Verdict | Failed]:
    """The verdict on each small row, of a process that interprets, or why there is none."""
    with Pool(run_trial, 1, _DEADLINE, partial(child_environment, interpret=True)) as pool:
        found = dict(pool.run(SMALL_ROWS))
    return [found[i] for i in range(len(SMALL_ROWS))]
