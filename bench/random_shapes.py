"""`python -m bench.random_shapes`: static defaults against a quick tuning of thirty random shapes.

Ten shapes from each of three seeds (bench/random_draw.py); `--rows ^random` of bench.prefill,
decode and serving races them against rivals. The records of the tunings lie in a folder beside
--out, and the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from bench.environment import describe
from bench.measured import paired
from bench.random_draw import SEEDS, Case, drawn
from bench.results import Report, RowResult, save
from bench.serving_rows import ServingRow
from bench.table import BARS
from bench.tasks import task
from flexattn.cli.tune import run_tuning
from flexattn.device import Device, detect
from flexattn.errors import FlexAttnError, InputError
from flexattn.measure.task import Task
from flexattn.measure.timing import Samples, paired_ratio
from flexattn.problem import Shape as Sizes
from flexattn.records.record import Record, key_of
from flexattn.records.store import Store
from flexattn.settings import override
from flexattn.tuning.evaluator import method_for
from flexattn.tuning.tasks import plan_task
from flexattn.tuning.tuner import environment_of
from flexattn.tuning.workload import Row as Call, ServedRow

BENCH = "random-shapes"
DEFAULT, BEST, TUNED = "default", "best", "tuned"


def cases(pattern: str = "") -> list[Case]:
    """The thirty, or those whose name the pattern matches; raises InputError where none does."""
    found = [each for seed in SEEDS for each in drawn(seed) if re.search(pattern, each.name)]
    if not found:
        raise InputError(f"--rows {pattern!r} matches no shape", "--list names all thirty")
    return found


def task_of_case(case: Case, device: Device, where: str) -> Task:
    """The problem that the static default of a shape serves."""
    row = case.row
    if not isinstance(row, ServingRow):
        return task(row, device, where)
    sizes = Sizes(len(row.lens), row.hq, row.hkv, row.q_len, max(row.lens), row.d, row.dv)
    served = ServedRow(row.page, "uniform")
    call = Call(row.name, None, row.dtype, sizes, None, None, (128, 128), None, (), served=served)
    return plan_task(call, device)


def tuned_row(name: str, record: Record) -> RowResult:
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
    return RowResult(f"{name} {TUNED}", TUNED, 0.0, 0, {}, samples, refused)


def gains(rows: Iterable[RowResult]) -> dict[str, float]:
    """Best time of a tuning over the default's, of each shape that has both."""
    return {
        row.name.removesuffix(f" {TUNED}"): paired_ratio(
            row.samples[BEST], row.samples[DEFAULT]
        ).value
        for row in rows
        if DEFAULT in row.samples
    }


def table(report: Report) -> str:
    """A line a shape, then the mean, the least, and how many are below the bars."""
    found = gains(report.rows)
    lines = ["| shape | best tuned / default |", "|---|---|"]
    lines += [f"| {name} | {ratio:.3f} |" for name, ratio in found.items()]
    if found:
        ratios = found.values()
        below = ", ".join(f"{sum(each < bar for each in ratios)} below {bar}" for bar in BARS)
        mean = statistics.geometric_mean(ratios)
        lines.append(
            f"geometric mean {mean:.3f} of {len(ratios)}, least {min(ratios):.3f}, {below}"
        )
    for facts in report.environments:
        lines.append("measured on " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune the shapes; the status is 1 where one has no result, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m bench.random_shapes", description=__doc__)
    add = parser.add_argument
    add("--rows", default="", metavar="REGEX", help="shapes whose name matches")
    add("--list", action="store_true", help="print the names of those shapes, and stop")
    add("--budget", type=float, default=4.0, help="seconds of measuring for each tuning")
    add("--seconds", type=float, default=math.inf, help="after which nothing new begins")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    add("--out", type=Path, metavar="FILE.json", default=Path("random-tuned.json"))
    args = parser.parse_args(argv)
    try:
        chosen = cases(args.rows)
        if args.list:
            print("\n".join(each.name for each in chosen))
            return 0
        if not torch.cuda.is_available():
            raise InputError("no GPU is visible to torch", "a bench times a GPU")
        store, device = Store(args.out.with_suffix(".records")), detect(torch.device("cuda"))
        tasks = {each.name: task_of_case(each, device, "cuda") for each in chosen}
        with override(mode="off"):  # the default is the static one, whatever records there are
            ran = run_tuning(
                list(tasks.values()), store, method_for("quick", args.budget), args.jobs, False,
                None, args.seconds,
            )  # fmt: skip
            found = {
                name: store.read(environment_of(each), key_of(each.problem))
                for name, each in tasks.items()
            }
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    rows = tuple(tuned_row(name, record) for name, record in found.items() if record is not None)
    report = Report(BENCH, {"budget": args.budget}, (describe(),), rows)
    save(report, args.out)
    print(table(report))
    return int(any(outcome.status == "failed" for outcome in ran.outcomes))


if __name__ == "__main__":
    sys.exit(main())
