"""What `flexattn tune` runs: a campaign over every GPU of the host, or the cost model's."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.console import Console

from flexattn.cli.selection import gpus_like, recorded_kind
from flexattn.cli.watch import Watch
from flexattn.errors import DeviceError
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.registry import short
from flexattn.measure.task import AnyTask
from flexattn.records import untuned
from flexattn.records.environment import environment
from flexattn.records.key import key_of
from flexattn.records.layers import layers
from flexattn.records.record import Record
from flexattn.records.store import Store
from flexattn.tune.builds import compilers
from flexattn.tune.campaign import (
    Campaign,
    TaskLocks,
    TuningOutcome,
    environment_of,
    pending,
)
from flexattn.tune.journal import settle
from flexattn.tune.method import Method
from flexattn.tune.plugin import Plugin
from flexattn.tune.pool import default_jobs
from flexattn.tune.tuner import GpuTuner, build_ahead

JOURNALS, LOCKS = "journals", "locks"


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of the tasks, whether Ctrl-C ended it, and which devices were lost, in words."""

    outcomes: tuple[TuningOutcome, ...]
    interrupted: bool = False
    lost: tuple[str, ...] = ()


def run_tuning(
    chosen: Sequence[AnyTask],
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
    journals = store.root / JOURNALS
    for task in chosen if again else ():
        # A process died between writing a record and dropping its journal.
        where, key = environment_of(task), key_of(task.problem)
        if (old := store.read(where, key)) is not None:
            settle(journals, old, store.path(where, key).stat().st_mtime)
    served = {each.store.root.resolve() for each in layers(device)}

    def landed(record: Record) -> None:
        """Drop what is kept until a record is on the disk."""
        settle(journals, record)
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
                GpuTuner(
                    method, pool, journals, watch.lane(), gpu=gpu, storage=storage,
                    again_since=time.time() if again else None,
                )
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
    chosen: Sequence[AnyTask],
    store: Store,
    effort: Effort,
    method: Method,
    again: bool,
) -> Ran:
    """As `run_tuning`, for a device of a plug-in's: by its cost model, or measured where it is."""
    where = plugin.tuning_environment
    todo = len(pending(chosen, store, again, where))
    with Watch(todo, Console(stderr=True)) as watch:
        tuner = plugin.tuner(watch.lane(), effort, method)
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
            watch.finished(_line(outcome), outcome.status != "kept")
    except KeyboardInterrupt:
        interrupted = True
    return Ran(tuple(found), interrupted, tuple(gone))


def _line(outcome: TuningOutcome) -> str:
    if outcome.answer is None:
        return f"{outcome.title}: failed: {outcome.message}"
    decision, config = outcome.answer.decision, short(outcome.answer.config)
    gain = "the static default" if decision.winner == decision.default else config
    by = " by the model" if outcome.answer.provenance == "model" else ""
    took = f" in {outcome.seconds:.0f} s" if outcome.status == "tuned" else ", kept"
    return f"{outcome.title}: {gain}, {decision.speedup:.3f}x{by}{took}"
