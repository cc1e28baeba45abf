"""`python -m bench.exhaustive`: time every config of a few problems, and keep all samples."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.command import chosen_rows
from bench.tasks import STUDIED, task
from flexattn.device import detect
from flexattn.errors import FlexAttnError
from flexattn.kernels.base.family import Effort
from flexattn.measure.task import Measurer, Task
from flexattn.measure.worker import Worker
from flexattn.records.record import SCHEMA, slug
from flexattn.tune.builds import BuiltConfig, build_all, compilers
from flexattn.tune.campaign import environment_of
from flexattn.tune.evaluator import Evaluator
from flexattn.tune.race import screen
from flexattn.tune.replay import Study, load_study, save
from flexattn.tune.subject import SILENT, Method, Subject, method_for, subject_of
from flexattn.tune.tuner import build_ahead

__all__ = ["Plan", "main", "measured"]

# The part of a problem's seconds that timing may take; the rest judges from the fastest on.
FOR_TIMING = 0.6
BATCH = 24
EFFORT: Effort = "exhaustive"


@dataclass(frozen=True)
class Plan:
    """The rounds of a problem's configs, of at least min_ms each, within `seconds` on the GPU."""

    rounds: int = 12
    min_ms: float = 1.0
    seconds: float = 40.0


def measured(
    subject: Subject, job: Task, built: Sequence[BuiltConfig], measurer: Measurer, plan: Plan
) -> Study:
    """Time all configs in batches beside the default, then judge them, the fastest first.

    What there was no time for is left out and counted. A config that nobody had time to judge
    keeps its samples and has no gate.
    """
    begin = time.monotonic()
    bench = Evaluator(subject, measurer, lambda configs: built, Method(), SILENT)
    table, default = bench.table, subject.default
    bench.build(range(len(table)))
    measurer.open(job)
    table.gate(default, measurer.gate(table[default].config))
    others = [i for i in range(len(table)) if i != default]
    for at in range(0, len(others), BATCH):
        if time.monotonic() - begin > FOR_TIMING * plan.seconds:
            break
        screen(measurer, table, others[at : at + BATCH], plan.rounds, plan.min_ms)
    for index in table.ranked():
        if time.monotonic() - begin > plan.seconds:
            break
        if table[index].gate is None:
            table.gate(index, measurer.gate(table[index].config))
    trials, decision, untimed = bench.compacted()
    rejected = (*subject.rejected, *((("not timed", untimed),) if untimed else ()))
    return Study(
        SCHEMA,
        subject.key,
        tuple(subject.sizes),  # type: ignore[arg-type]
        subject.environment,
        replace(subject.policy, rounds=plan.rounds, min_ms=plan.min_ms),
        decision.default,
        trials,
        rejected,
        subject.title,
        datetime.now(timezone.utc).date().isoformat(),
        "bench.exhaustive",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows; the status is 1 if one of them has no study in the end."""
    args = _parser().parse_args(argv)
    plan = Plan(seconds=args.seconds)
    try:
        rows = chosen_rows(STUDIED, args.rows)
        if args.list:
            print("\n".join(row.name for row in rows))
            return 0
        target = detect(torch.device("cuda"))
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    folder = args.out or Path("configs/studies") / slug(target.name)
    paths = {row.name: folder / f"{row.name}.json" for row in rows}
    jobs = [
        task(row, target, "cuda") for row in rows if args.again or not paths[row.name].exists()
    ]
    failed = 0
    with compilers(args.jobs) as pool, Worker() as worker:
        build_ahead(jobs, method_for(EFFORT), pool)
        for job in jobs:
            begin, name = time.monotonic(), job.title
            try:
                subject = subject_of(job, environment_of(job), EFFORT)
                built = build_all(job.problem, subject.configs, target, pool=pool)
                study = measured(subject, job, built, worker, plan)
                save(study, paths[name])
                load_study(paths[name])
                print(f"{name}: {_said(study)}, {time.monotonic() - begin:.0f} s", flush=True)
            except Exception:  # the others may still be measured, whatever this one met
                failed += 1
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    return int(failed > 0)


def _said(study: Study) -> str:
    timed = sum(bool(t.screening) for t in study.trials)
    broken = sum(t.failed is not None for t in study.trials)
    judged = sum(t.gate is not None for t in study.trials)
    return f"{timed} timed, {judged} judged, {broken} failed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.exhaustive", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="default: configs/studies/<device>")
    add("--rows", default="", metavar="REGEX", help="the rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--again", action="store_true", help="also rows whose file is in --out already")
    add("--seconds", type=float, default=40.0, help="of the GPU for each row")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
