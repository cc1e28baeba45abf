"""`flexattn tune`: find the fastest config of every problem of a workload, and keep it."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flexattn.cli import arguments
from flexattn.cli.dry import plan_of, print_plan
from flexattn.cli.neuron import check_measuring, environment_there
from flexattn.cli.places import users
from flexattn.cli.selection import EFFORTS, device_here, device_of, effort_of, rows_of
from flexattn.cli.terminal import cell, say, say_json, say_text
from flexattn.cli.tuning import rank, run
from flexattn.device import Device
from flexattn.errors import InputError, UnsupportedError
from flexattn.measure.task import AnyTask
from flexattn.presets import files
from flexattn.records.store import Store
from flexattn.records.untuned import untuned_path
from flexattn.tune.campaign import Outcome, Where, environment_of
from flexattn.tune.method import method_for
from flexattn.tune.tasks import distinct, plan_task, task_of
from flexattn.tune.untuned import NOTE, untuned_tasks
from flexattn.tune.workload import read

INTERRUPTED = 130
OFFLINE = "nvidia-h200"


def tune(
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(help="Workload files, TOML or YAML; lists with --from-untuned."),
    ] = None,
    preset: arguments.Presets = None,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="List the presets and stop.")
    ] = False,
    only: arguments.Only = None,
    from_untuned: Annotated[
        bool,
        typer.Option("--from-untuned", help="Tune what dispatch listed in untuned.jsonl."),
    ] = False,
    effort: Annotated[str, typer.Option(help=f"{', '.join(EFFORTS)}.")] = "full",
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of measuring for each problem.")
    ] = None,
    time: Annotated[
        float | None,
        typer.Option("--time", min=0.0, help="Seconds after which no further problem begins."),
    ] = None,
    device: arguments.DeviceHere = None,
    storage: Annotated[
        str | None, typer.Option(help="An Optuna storage URL that many machines share.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0 for all cores.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the records; the user's own by default.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List problems and spaces; needs no GPU.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Each new record replaces older ones of its problem that the same Triton made.",
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Tune what has a record already too; in --storage, what was finished.",
        ),
    ] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Tune a workload's problems; each record is kept as soon as its problem is done.

    Ctrl-C keeps what is finished, and the same command goes on from there. For trn1, trn2 and trn3
    a cost model ranks the configs, on any machine; on a Neuron instance its best ones are built
    and measured.
    """
    if list_presets:
        _list_presets(as_json)
        return
    which = effort_of(effort)
    target = device_of(device, OFFLINE, neuron=True)
    where: Where = environment_of
    if target.backend == "neuron":
        check_measuring(target, which, budget, storage)
        where = environment_there
    lists = workloads or [untuned_path()] if from_untuned else []
    if from_untuned and preset:
        raise InputError("--from-untuned with --preset", "it is one or the other")
    gpu = target.backend != "neuron"
    rows = []
    if not from_untuned:
        rows = rows_of(workloads or (), preset or (), only, plans=gpu, backward=gpu)
    if not dry_run and where is environment_of:
        _can_time(target)
    found: list[AnyTask] = [task for path in lists for task in untuned_tasks(path, target)]
    found += [
        plan_task(row, target) if row.served else task_of(row, target, torch.device("cpu"))
        for row in rows
    ]
    chosen, others = distinct(found)
    store = Store(out or users())
    if dry_run:
        plan = plan_of(chosen, others, store, which, again, where)
        say_json(plan) if as_json else print_plan(plan)
        return
    method = method_for(which, budget)
    if from_untuned:
        method = replace(method, provenance="untuned", note=NOTE)
    if target.backend == "neuron":
        ran = rank(chosen, store, which, method, again)
    else:
        seconds = math.inf if time is None else time
        ran = run(chosen, store, method, jobs, again, storage, seconds, prune)
    told = {
        "directory": str(store.root),
        "problems": [_told(outcome, store) for outcome in ran.outcomes],
        "same_key": {task.title: kept.title for task, kept in others},
        "left": len(chosen) - len(ran.outcomes),
        "lost": list(ran.lost),
        "interrupted": ran.interrupted,
    }
    if as_json:
        say_json(told)
    else:
        for words in ran.lost:
            say_text(words)
        say(f"{_counts(ran.outcomes, len(chosen))}; records in {store.root}")
    if told["left"]:
        why = "interrupted" if ran.interrupted else "the time is over,"
        again_with = shlex.join(["flexattn", *sys.argv[1:]])
        kept = "what was measured of them is kept; " if ran.interrupted else ""
        say(f"{why} with {told['left']} left; {kept}go on with: {again_with}", err=True)
    if ran.interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(outcome.status == "failed" for outcome in ran.outcomes):
        raise typer.Exit(1)


def _can_time(target: Device) -> None:
    here = device_here()
    if here is not None and here.name == target.name:
        return
    seen = "torch sees no GPU" if here is None else f"this is {here.name}"
    raise UnsupportedError(
        f"tuning for {target.name}, and {seen}",
        "times come from the device itself",
        f"run it there; here, --dry-run lists the problems, and `flexattn build --device "
        f"{target.name}` compiles them",
    )


def _counts(outcomes: Sequence[Outcome], asked: int) -> str:
    found = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{count} {status}" for status, count in found.items())
    if len(outcomes) < asked:
        return f"{told or 'nothing finished'}, of {asked}"
    return told or "nothing to tune"


def _told(outcome: Outcome, store: Store) -> dict[str, Any]:
    answer = outcome.answer
    told: dict[str, Any] = {
        "title": outcome.title,
        "status": outcome.status,
        "key": asdict(outcome.key),
        "seconds": round(outcome.seconds, 3),
        "message": outcome.message,
    }
    if answer is not None:
        told |= {
            "config": asdict(answer.config),
            "decision": asdict(answer.decision),
            "provenance": answer.provenance,
            "path": str(store.path(answer.environment, answer.key)),
        }
    return told


def _list_presets(as_json: bool) -> None:
    found = [read(path) for path in files().values()]
    if as_json:
        rows = [
            {
                "name": each.name,
                "title": each.title,
                "models": each.models,
                "note": each.note,
                "rows": [row.title for row in each.rows],
            }
            for each in found
        ]
        say_json({"presets": rows})
        return
    table = Table()
    for name in ("preset", "what it is", "calls", "models"):
        table.add_column(name)
    for each in found:
        table.add_row(
            *map(cell, (each.name, each.title, str(len(each.rows)), ", ".join(each.models)))
        )
    Console().print(table)
