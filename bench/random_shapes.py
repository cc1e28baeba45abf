"""`python -m bench.random_shapes`: thirty random shapes against rivals, defaults against tuning.

Ten shapes from each of three seeds (bench/random_draw.py). In a race of a shape ours is called as
a user calls it, behind the gate; then the static default is raced with what a quick tuning finds.
The same command goes on where it ended: shapes that --out has are not run again.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.environment import describe
from bench.measured import paired
from bench.peers import OURS, PEERS, TEMPLATES, ours_with
from bench.random_draw import SEEDS, Case, drawn
from bench.results import Report, RowResult, load, merge, save
from bench.runner import Method, run_row
from bench.serving import run_row as run_served
from bench.serving_ahead import compile_ahead
from bench.serving_inputs import DTYPES
from bench.serving_peers import EMPTY, INVARIANT, SERVING_PEERS
from bench.serving_rows import ServingRow
from bench.streaming import STREAMING
from bench.tasks import task
from bench.time_limit import time_limit
from flexattn.device import Device, detect
from flexattn.errors import FlexAttnError, InputError
from flexattn.kernels.choose.registry import short
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import AnyTask
from flexattn.measure.timing import Samples, paired_ratio
from flexattn.measure.worker import Worker
from flexattn.problem import Shape as Sizes
from flexattn.records.record import Record
from flexattn.settings import override
from flexattn.tune.builds import build_task, compilers
from flexattn.tune.compile_queue import CompileQueue, Runs
from flexattn.tune.gpu_tuner import build_ahead
from flexattn.tune.method import Method as Tuning, method_for
from flexattn.tune.tasks import plan_task
from flexattn.tune.tuner import tune
from flexattn.tune.workload import Row as Call, ServedRow

__all__ = ["BENCH", "Told", "cases", "main", "task_of_case", "told", "tuned_row"]

BENCH = "random-shapes"
DEFAULT, BEST, TUNED = "default", "best", "tuned"
# What a race against the best rival is held to: the mean, how many below 0.97, and below 0.92.
BARS = (0.97, 0.92)
PREFILL = Method(rounds=15, min_ms=5.0)
DECODE = Method(rounds=15, min_ms=3.0, flush_l2=True, graph=True)
# Ours by template, named to be timed; decode's serves the few rows of a chunk too.
OWN = {**TEMPLATES, f"{OURS}-split": ours_with({"BACKEND": "TRITON_DECODE"})}
# No rivals: measures of the machine, and ours by template or under a constraint.
ASIDE = {EMPTY, STREAMING, INVARIANT, "bf16", *OWN}


@dataclass(frozen=True)
class Told:
    """What a row shows: its two ratios, above 1 where ours is faster; NaN where there is none.

    rival: time of the best one over ours. default: best time of a tuning over the default's.
    """

    name: str
    who: str
    rival: float
    default: float
    us: float
    best_us: float
    red: bool = False


def cases(pattern: str = "") -> list[Case]:
    """The thirty, or those whose name the pattern matches; raises InputError where none does."""
    found = [each for seed in SEEDS for each in drawn(seed) if re.search(pattern, each.name)]
    if not found:
        raise InputError(f"--rows {pattern!r} matches no shape", "--list names all thirty")
    return found


def task_of_case(case: Case, device: Device, where: str) -> AnyTask:
    """What is tuned: the problem that the static default of a shape serves."""
    row = case.row
    if not isinstance(row, ServingRow):
        return task(row, device, where, case.dtype)
    sizes = Sizes(len(row.lens), row.hq, row.hkv, row.q_len, max(row.lens), row.d, row.dv)
    served = ServedRow(row.page, "uniform")
    call = Call(row.name, None, row.dtype, sizes, None, None, (128, 128), None, (), served=served)
    return plan_task(call, device)


def raced(case: Case, peers: Sequence[str], rounds: int) -> RowResult:
    """The shape against its rivals, interleaved."""
    row = case.row
    if isinstance(row, ServingRow):
        known: Mapping[str, Any] = SERVING_PEERS
        method, run = DECODE, run_served
    else:
        known = {**PEERS, **OWN}
        method = DECODE if case.kind == "decode" else PREFILL
        run = run_row  # type: ignore[assignment]
    usual = [name for name in known if name not in ASIDE]
    chosen = {name: known[name] for name in peers or usual if name in known}
    method = replace(method, rounds=rounds or method.rounds, dtype=DTYPES[case.dtype])
    return run(row, chosen, method)  # type: ignore[arg-type]


def tuned_row(case: Case, record: Record) -> RowResult:
    """A tuning as a row: samples of the default and of the fastest, from rounds that both ran."""
    found = paired(record.trials, record.decision.default)
    both = min(
        found.values(), key=lambda pairs: statistics.median(a / b for a, b in pairs), default=[]
    )
    refused = {} if both else {DEFAULT: "the static default has no time"}
    samples = {
        who: Samples(tuple(pair[index] for pair in both), calls=1)
        for index, who in enumerate((BEST, DEFAULT))
        if both
    }
    return RowResult(f"{case.name} {TUNED}", TUNED, 0.0, 0, {}, samples, refused)


def told(rows: Iterable[RowResult]) -> list[Told]:
    """What the rows of a report show, one for each shape, in their order."""
    by_name = {row.name: row for row in rows}
    names = dict.fromkeys(name.removesuffix(f" {TUNED}") for name in by_name)
    nothing = RowResult("", "", 0.0, 0, {}, {}, {})
    found = []
    for name in names:
        race, tuning = (by_name.get(each, nothing) for each in (name, f"{name} {TUNED}"))
        red = any(not gate.passed for gate in race.gates.values())
        rivals = {
            who: paired_ratio(each, race.samples[OURS]).value
            for who, each in race.samples.items()
            if who not in {OURS, *ASIDE} and OURS in race.samples and not red
        }
        rivals = {who: ratio for who, ratio in rivals.items() if not math.isnan(ratio)}
        who = min(rivals, key=lambda each: rivals[each], default="")
        default = math.nan
        if DEFAULT in tuning.samples:
            default = paired_ratio(tuning.samples[BEST], tuning.samples[DEFAULT]).value
        ours = race.samples.get(OURS, Samples()).median if not red else math.nan
        best = race.samples.get(who, Samples()).median
        found.append(Told(name, who, rivals.get(who, math.nan), default, ours, best, red))
    return found


def table(report: Report) -> str:
    """The rows, then means and how many are below the bars."""
    found = told(report.rows)
    lines = [
        "| shape | ours µs | best rival µs | rival / ours | best tuned / default |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        ours = "gate red" if each.red else _number(each.us, ".1f")
        rival = f"{each.who} {_number(each.best_us, '.1f')}" if each.who else "-"
        lines.append(
            f"| {each.name} | {ours} | {rival} | {_number(each.rival)} | {_number(each.default)} |"
        )
    for name, values in (
        ("rival / ours", [each.rival for each in found]),
        ("best tuned / default", [each.default for each in found]),
    ):
        lines.append(summary(name, values))
    for facts in report.environments:
        lines.append("measured on " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    return "\n".join(lines)


def summary(name: str, values: Sequence[float]) -> str:
    """Geometric mean, least, and how many are below each bar, of values that are there."""
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return f"{name}: none"
    mean = statistics.geometric_mean(there)
    below = ", ".join(f"{sum(value < bar for value in there)} below {bar}" for bar in BARS)
    return f"{name}: geometric mean {mean:.3f} of {len(there)}, least {min(there):.3f}, {below}"


def _number(value: float, form: str = ".3f") -> str:
    return "-" if math.isnan(value) else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Race and tune the shapes; the status is 1 where a gate is red or a shape has no result."""
    args = _parser().parse_args(argv)
    try:
        chosen = cases(args.rows)
        if args.list:
            print("\n".join(each.name for each in chosen))
            return 0
        if args.merge:
            report = merge([load(path) for path in args.merge])
        elif not torch.cuda.is_available():
            raise InputError("no GPU is visible to torch", "a bench times a GPU")
        else:
            report = _run(chosen, args)
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    if args.out:
        save(report, args.out)
    print(table(report))
    return int(any(each.red for each in told(report.rows)))


def _run(chosen: Sequence[Case], args: argparse.Namespace) -> Report:
    """Every part of every shape that --out has not, until the seconds are over."""
    until = time.monotonic() + args.seconds
    methods = {"prefill": PREFILL.facts(), "decode": DECODE.facts(), "budget": args.budget}
    report = Report(BENCH, methods, (describe(),), ())
    if args.out and args.out.exists():
        report = merge([load(args.out), report])
    device, tuning = detect(torch.device("cuda")), method_for("quick", args.budget)
    have = {row.name for row in report.rows}
    parts: dict[str, Callable[[], RowResult]] = {}
    with ExitStack() as stack:
        if not args.no_race:
            waiting = [each for each in chosen if each.name not in have]
            compile_ahead([e.row for e in waiting if isinstance(e.row, ServingRow)], device)
            peers = args.peers.split(",") if args.peers else ()
            for each in waiting:
                parts[each.name] = lambda case=each: raced(case, peers, args.rounds)  # type: ignore[misc]
        if not args.no_tune:
            compile_queue = stack.enter_context(CompileQueue(compilers(args.jobs)))
            worker = stack.enter_context(Worker())
            waiting = [each for each in chosen if f"{each.name} {TUNED}" not in have]
            tasks = {each.name: task_of_case(each, device, "cuda") for each in waiting}
            with override(mode="off"):
                build_ahead(list(tasks.values()), tuning, compile_queue)
            for each in waiting:
                parts[f"{each.name} {TUNED}"] = lambda case=each: tuned_row(  # type: ignore[misc]
                    case, _tuned(tasks[case.name], worker, compile_queue, tuning)
                )
        # A shape's race and its tuning follow each other.
        order = {each.name: place for place, each in enumerate(chosen)}
        for name in sorted(parts, key=lambda each: order[each.removesuffix(f" {TUNED}")]):
            if time.monotonic() > until:
                break
            begin = time.monotonic()
            try:
                with time_limit():
                    row = parts[name]()
            except Exception:  # the others may still be run, whatever this one met
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
                continue
            fresh = Report(BENCH, methods, (describe(),), (row,))
            report = merge([report, fresh]) if report.rows else fresh
            if args.out:
                save(report, args.out)
            ours = ", ".join(f"{who} {s.median:.1f}" for who, s in row.samples.items() if s.us)
            print(f"{name} in {time.monotonic() - begin:.0f} s: {ours} us", flush=True)
    return report


def _tuned(job: AnyTask, worker: Measurer, pool: Runs, tuning: Tuning) -> Record:
    """A quick tuning whose default is the static one, whatever records there are."""
    with override(mode="off"):
        found = tune(job, worker, lambda configs: build_task(job, configs, pool=pool), tuning)
    default = found.trials[found.decision.default].config
    print(f"  {short(default)} -> {short(found.config)}", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.random_shapes", description=__doc__)
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="shapes whose name matches")
    add("--list", action="store_true", help="print the names of those shapes, and stop")
    add("--peers", default="", metavar="A,B", help="these alone; flexattn is one of them")
    add("--no-race", action="store_true", help="tune alone")
    add("--no-tune", action="store_true", help="race alone")
    add("--rounds", type=int, default=0, help="samples of each candidate of a race")
    add("--budget", type=float, default=4.0, help="seconds of measuring for each tuning")
    add("--seconds", type=float, default=math.inf, help="after which nothing new begins")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    add("--out", type=Path, metavar="FILE.json", help="write after each part; go on from there")
    add("--merge", type=Path, nargs="+", metavar="FILE.json", help="run nothing; a table of these")
    return parser


if __name__ == "__main__":
    sys.exit(main())
