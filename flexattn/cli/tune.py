"""`flexattn tune`: problems become records. `flexattn build`: a space compiled anywhere."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flexattn.cli import options
from flexattn.cli.selection import (
    asked_rows,
    device_here,
    device_of,
    effort_of,
    gpus_like,
    problem_called,
    recorded_kind,
    say_assumed,
    users,
)
from flexattn.cli.terminal import (
    INTERRUPTED,
    cell,
    say,
    say_json,
    say_text,
    table_of,
    tell,
    wide_console,
)
from flexattn.cli.watch import Watch
from flexattn.device import Device
from flexattn.errors import DeviceError, FlexAttnError, InputError, UnsupportedError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import Survey, survey
from flexattn.kernels.choose.registry import short
from flexattn.measure.task import Task
from flexattn.presets import files
from flexattn.records import untuned
from flexattn.records.environment import environment
from flexattn.records.layers import layers
from flexattn.records.record import Record, key_of
from flexattn.records.store import Store
from flexattn.records.untuned import untuned_path
from flexattn.tuning.builds import BuiltConfig, build_all, compilers, default_jobs
from flexattn.tuning.evaluator import Method, method_for
from flexattn.tuning.tasks import NOTE, distinct, task_of, untuned_tasks
from flexattn.tuning.tuner import (
    Campaign,
    GpuTuner,
    Plugin,
    TaskLocks,
    TuningOutcome,
    Where,
    build_ahead,
    environment_of,
    pending,
    plugin_of,
)
from flexattn.tuning.workload import read


def run(asked: options.Tune) -> None:
    """As `flexattn tune` is asked."""
    if asked.list_presets:
        _list_presets()
        return
    which = effort_of(asked.effort)
    target = device_of(asked.device, neuron=True)
    where: Where = environment_of
    plugin = plugin_of(target.backend)
    if plugin is not None:
        plugin.check_tuning(target, which, asked.storage)
        where = plugin.tuning_environment
    lists = [*map(Path, asked.problems or (untuned_path(),))] if asked.from_untuned else []
    for path in lists if asked.problems else ():
        if not path.exists():
            raise InputError(f"{path}: no such file", "a list is a file, as untuned.jsonl is one")
    if asked.from_untuned and (asked.named or asked.only is not None or asked.sized):
        raise InputError(
            "--from-untuned with --preset, --workload, --only or sizes",
            "a list of untuned problems is tuned whole",
            "leave out --from-untuned, or the others",
        )
    if asked.again and asked.storage is not None:
        raise InputError(
            "--again with --storage",
            "a study in a database is measured once, and each worker takes its record",
            "name another database, or remove the study from this one",
        )
    rows = []
    if not asked.from_untuned:
        rows = asked_rows(asked, plans=plugin is None, backward=plugin is None)
    if not asked.dry_run and plugin is None:
        _can_time(target)
    found = [task for path in lists for task in untuned_tasks(path, target)]
    found += [task_of(row, target, torch.device("cpu")) for row in rows]
    chosen, others = distinct(found)
    store = Store(asked.out or users())
    if asked.dry_run:
        say_assumed(asked.device, target)
        plan = plan_of(target, chosen, others, store, which, asked.again, where)
        say_json(plan) if asked.as_json else print_plan(plan)
        return
    method = method_for(which, asked.budget)
    if asked.from_untuned:
        method = replace(method, provenance="untuned", note=NOTE)
    if plugin is not None:
        ran = run_plugin(plugin, target, chosen, store, which, method, asked.again)
    else:
        seconds = math.inf if asked.time is None else asked.time
        ran = run_tuning(
            chosen, store, method, asked.jobs, asked.again, asked.storage, seconds, asked.prune
        )
    told = {
        "directory": str(store.root),
        "problems": [_told(outcome, store) for outcome in ran.outcomes],
        "same_key": {task.title: kept.title for task, kept in others},
        "left": len(chosen) - len(ran.outcomes),
        "lost": list(ran.lost),
        "interrupted": ran.interrupted,
    }
    if asked.as_json:
        say_json(told)
    else:
        for words in ran.lost:
            say_text(words)
        say(f"{_counts(ran.outcomes, len(chosen))}; records in {store.root}")
    if told["left"]:
        why = "interrupted" if ran.interrupted else "the time is over,"
        again_with = shlex.join(["flexattn", *sys.argv[1:]])
        say(f"{why} with {told['left']} left; go on with: {again_with}", err=True)
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


def _counts(outcomes: Sequence[TuningOutcome], asked: int) -> str:
    found = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{count} {status}" for status, count in found.items())
    if len(outcomes) < asked:
        return f"{told or 'nothing finished'}, of {asked}"
    return told or "nothing to tune"


def _told(outcome: TuningOutcome, store: Store) -> dict[str, Any]:
    answer = outcome.answer
    told = {
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


def _list_presets() -> None:
    table = table_of("preset", "what it is", "calls", "models")
    for each in map(read, files().values()):
        table.add_row(
            *map(cell, (each.name, each.title, str(len(each.rows)), ", ".join(each.models)))
        )
    wide_console().print(table)


def plan_of(
    target: Device,
    chosen: Sequence[Task],
    others: Sequence[tuple[Task, Task]],
    store: Store,
    effort: Effort,
    again: bool,
    where: Where = environment_of,
) -> dict[str, Any]:
    """The plan of a tuning: problems with their keys, configs and rejections by reason."""
    open_titles = {task.title for task in pending(chosen, store, again, where)}
    problems = []
    for task in chosen:
        status, message = "to tune" if task.title in open_titles else "kept", ""
        plugin, space = plugin_of(task.device.backend), Survey((), ())
        if plugin is None:
            space = survey(task.problem, task.device, effort)
        else:
            try:
                space = plugin.survey_of(task, effort)
            except FlexAttnError as error:
                status, message = "cannot", str(error)
        key = key_of(task.problem)
        problems.append({
            "title": task.title,
            "problem": task.problem.describe(),
            "key": asdict(key),
            "digest": key.digest(),
            "policy": asdict(task.policy),
            "default": short(space.configs[0]) if space.configs else "",
            "configs": len(space.configs),
            "rejected": dict(space.rejected),
            "status": status,
            "message": message,
        })  # fmt: skip
    return {
        "device": target.name,
        "effort": effort,
        "directory": str(store.root),
        "problems": problems,
        "same_key": {task.title: kept.title for task, kept in others},
    }


_COLUMNS = (
    ("key", "the sizes under which a record is filed: each rounded up to a power of two"),
    ("mask class", "of the mask's blocks: how many are kept (d1/8: an eighth), how uneven the "
     "rows are (i1: even), and whether a row's blocks are runs or have gaps"),
    ("configs", "variants of kernels that would be compiled, checked and raced"),
    ("rejected", "variants that cannot run or are never fast; the last line counts them by rule"),
)  # fmt: skip


def print_plan(plan: dict[str, Any]) -> None:
    """The plan as a table, and below it what its columns are and what was rejected."""
    console = wide_console()
    title = f"{plan['device']}, effort {plan['effort']}: nothing is built or timed"
    table = Table(title=title, box=SIMPLE_HEAD)
    # On a narrow screen titles and classes wrap, and the numbers stay.
    for name in ("problem", "key", "mask class"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for name in ("configs", "rejected"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("")
    rejected = Counter[str]()
    for each in plan["problems"]:
        key = each["key"]
        rejected.update(each["rejected"])
        table.add_row(
            cell(each["title"]),
            f"B{key['B']} {key['q_len']}x{key['kv_len']}",
            cell(key["mask_class"]),
            str(each["configs"]),
            str(sum(each["rejected"].values())),
            "" if each["status"] == "to tune" else each["status"],
        )
    console.print(table)
    for each in plan["problems"]:
        if each["message"]:
            text = f"{each['title']}: {each['message']}"
            tell(console, text)
    for title, kept in plan["same_key"].items():
        tell(console, f"{title}: same key as {kept}")
    for name, meaning in _COLUMNS:
        tell(console, f"{name}: {meaning}", "dim")
    total = sum(each["configs"] for each in plan["problems"])
    said = ", ".join(f"{count} {name}" for name, count in sorted(rejected.items()))
    count = len(plan["problems"])
    tell(console, f"{count} problems, {total} configs; rejected: {said or 'none'}")


LOCKS = "locks"


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcomes of the tasks; true where Ctrl-C ended it; lost devices, in words."""

    outcomes: tuple[TuningOutcome, ...]
    interrupted: bool = False
    lost: tuple[str, ...] = ()


def run_tuning(
    chosen: Sequence[Task],
    store: Store,
    method: Method,
    jobs: int,
    again: bool,
    storage: str | None,
    time_s: float = math.inf,
    prune: bool = False,
) -> Ran:
    """Tune the tasks, with a worker for every such GPU of this host, and compilers ahead of them.

    time_s: seconds after which no problem begins. prune: a record takes the place of those of its
    key that the same Triton made on this device in another environment.
    """
    until = time.monotonic() + time_s
    todo = pending(chosen, store, again)
    if not chosen:
        return Ran(())
    device = chosen[0].device
    gpus = (gpus_like(device) or [0])[: max(1, len(todo))]
    served = {each.store.root.resolve() for each in layers(device)}

    def landed(record: Record) -> None:
        """Drop what a record on the disk makes needless."""
        if prune:
            store.drop_others(record.environment, record.key)
        # Elsewhere, or measured in another way, it is none that dispatch will take for its own.
        here = environment(recorded_kind(record.key.kind), device)
        if store.root.resolve() in served and record.environment == here:
            untuned.drop(record.key, device.name)

    # What launches kernels and times them has a core of its own.
    jobs = jobs or max(1, default_jobs() - len(gpus))
    with Watch(len(todo), Console(stderr=True)) as watch, ExitStack() as stack:
        pool = stack.enter_context(compilers(jobs))
        on_gpus = [
            stack.enter_context(
                GpuTuner(method, pool, watch.lane(), gpu=gpu, storage=storage)
            )
            for gpu in gpus
        ]  # fmt: skip
        if storage is None:
            build_ahead(todo, method, pool)
        # Workers of one database share each problem; without it a problem is one tuner's.
        locks = TaskLocks(store.root / LOCKS) if storage is None else None
        tuners = [each.tune for each in on_gpus]
        run = Campaign(chosen, store, tuners, again, landed=landed, until=until, locks=locks)
        return _followed(run, [f"GPU {gpu}" for gpu in gpus], watch)


def run_plugin(
    plugin: Plugin,
    device: Device,
    chosen: Sequence[Task],
    store: Store,
    effort: Effort,
    method: Method,
    again: bool,
) -> Ran:
    """As `run_tuning`, for a device of a plug-in's."""
    where = plugin.tuning_environment
    todo = len(pending(chosen, store, again, where))
    with Watch(todo, Console(stderr=True)) as watch:
        tuner = plugin.tuner(device, watch.lane(), effort, method)
        run = Campaign(chosen, store, [tuner], again, where)
        return _followed(run, ["the instance"], watch)


def _followed(run: Campaign, names: Sequence[str], watch: Watch) -> Ran:
    """The campaign to its end, each problem a line; names: of its tuners."""
    found: list[TuningOutcome] = []
    gone: list[str] = []
    interrupted = False

    def lost(number: int, error: DeviceError) -> None:
        gone.append(f"{names[number]} is lost and took no more problems: {error.got}")
        watch.say(gone[-1])

    try:
        for outcome in replace(run, lost=lost, say=watch.say):
            found.append(outcome)
            watch.finished(outcome_line(outcome), outcome.status != "kept")
    except KeyboardInterrupt:
        interrupted = True
    return Ran(tuple(found), interrupted, tuple(gone))


def outcome_line(outcome: TuningOutcome) -> str:
    """An outcome in words: the config, its speedup, and how long it took."""
    if outcome.answer is None:
        return f"{outcome.title}: failed: {outcome.message}"
    decision, config = outcome.answer.decision, short(outcome.answer.config)
    gain = "the static default" if decision.winner == decision.default else config
    took = f" in {outcome.seconds:.0f} s" if outcome.status == "tuned" else ", kept"
    return f"{outcome.title}: {gain}, {decision.speedup:.3f}x{took}"


def build_space(args: options.Build) -> None:
    """Run `flexattn build`: a line for each config as it ends, and what was not built by rule."""
    if args.jobs < 0 or args.deadline <= 0:
        got = f"--jobs {args.jobs} --deadline {args.deadline:g}"
        raise InputError(got, "neither is below 0")
    effort, device = effort_of(args.effort), device_of(args.device, compiled=True)
    problem = problem_called(args, args.kv_len)
    say_assumed(args.device, device)
    space = survey(problem, device, effort)
    count, done = len(space.configs), 0
    say(f"{problem.describe()} for {device.name} ({device.arch}), effort {effort}")

    def tell_of(built: BuiltConfig) -> None:
        nonlocal done
        done += 1
        say(f"{done}/{count} {built_line(built)}")

    try:
        found = build_all(
            problem, space.configs, device, args.jobs, deadline=args.deadline, say=tell_of
        )
    except KeyboardInterrupt:
        say(
            f"interrupted with {done} of {count} configs compiled; Triton's cache keeps those, "
            "and the same command goes on from there",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    broken = [each.failed for each in found if each.failed and each.failed.stage != "resources"]
    for failed in broken:
        say_text(failed.message, err=True)
    # A device cannot tell configs of one code apart.
    timed = len({each.code for each in found if each.failed is None})
    rejected = ", ".join(f"{number} {name}" for name, number in space.rejected) or "none"
    say(f"{count} configs, {timed} worth timing; rejected: {rejected}")
    if broken or not timed:
        raise typer.Exit(1)


def built_line(built: BuiltConfig) -> str:
    """One line: the resources of a config's kernel, or why it is not timed."""
    name, failed = short(built.config), built.failed
    if failed is not None:
        text = failed.message if failed.stage == "resources" else failed.error
        return f"{name}: {failed.stage}: {text}"
    return (
        f"{name}: {built.registers} registers, {built.spills} spills, {built.shared_memory} bytes "
        f"shared, {built.matrix_instructions} matrix instructions, {built.seconds:.1f} s"
    )
