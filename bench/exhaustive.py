"""`python -m bench.exhaustive`: tune the whole space of a few problems, and keep all samples."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bench.command import chosen_rows
from bench.studies import Study, save
from bench.tasks import STUDIED, task
from flexattn.device import detect
from flexattn.errors import FlexAttnError
from flexattn.records.record import SCHEMA, Record, slug
from flexattn.tuning.builds import compilers
from flexattn.tuning.evaluator import SILENT, Method
from flexattn.tuning.tuner import GpuTuner, build_ahead


def study_of(record: Record) -> Study:
    """The study that a tuning of a whole space is: its trials, without its decision."""
    known: dict[str, Any] = {each.name: getattr(record, each.name, None) for each in fields(Study)}
    return Study(**known | {"schema": SCHEMA, "default": record.decision.default})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows; the status is 1 if one of them has no study in the end."""
    parser = argparse.ArgumentParser(prog="python -m bench.exhaustive", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="default: configs/studies/<device>")
    add("--rows", default="", metavar="REGEX", help="the rows whose group/name matches")
    add("--list", action="store_true", help="print the names of those rows, and stop")
    add("--again", action="store_true", help="also rows whose file is in --out already")
    add("--seconds", type=float, default=80.0, help="of measuring for each row")
    add("--jobs", type=int, default=0, help="processes that compile; 0 for all cores")
    args = parser.parse_args(argv)
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
    method = Method("exhaustive", args.seconds, rounds=12, batch=24, all_up_to=2**31)
    failed = 0
    with compilers(args.jobs) as pool, GpuTuner(method, pool, SILENT) as tuner:
        build_ahead(jobs, method, pool)
        for job in jobs:
            try:
                record = tuner.tune(job)
                save(study_of(record), paths[job.title])
                timed = sum(bool(trial.screening) for trial in record.trials)
                left = dict(record.rejected)
                print(f"{job.title}: {timed} timed in {record.seconds:.0f} s; {left}", flush=True)
            except Exception:  # the others may still be measured, whatever this one met
                failed += 1
                print(f"{job.title}: failed\n{traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
