"""What `flexattn tune` runs: a campaign over every GPU of the host, or the cost model's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console

from flexattn.cli.selection import gpus_like, recorded_kind
from flexattn.cli.watch import Watch
from flexattn.device import Device
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
    TuneTask,
    TuningOutcome,
    Where,
    campaign,
    environment_of,
    pending,
)
from flexattn.tune.compile_queue import CompileQueue
from flexattn.tune.gpu_tuner import GpuTuner, build_ahead
from flexattn.tune.journal import settle
from flexattn.tune.method import Method
from flexattn.tune.plugin import Plugin
from flexattn.tune.pool import default_jobs
from flexattn.tune.task_locks import TaskLocks

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
    if again:
        _forget(chosen, store)
    # What launches kernels and times them has a core of its own.
    jobs = jobs or max(1, default_jobs() - len(gpus))
    with Watch(len(todo), Console(stderr=True)) as watch, ExitStack() as stack:
        compile_queue = stack.enter_context(CompileQueue(compilers(jobs)))
        on_gpus = [
            stack.enter_context(
                GpuTuner(
                    method, compile_queue, journals, watch.lane(), gpu=gpu, storage=storage,
                    again_since=time.time() if again else None,
                )
            )
            for gpu in gpus
        ]  # fmt: skip
        if storage is None:
            build_ahead(todo, method, compile_queue)
        names = [f"GPU {gpu}" for gpu in gpus]
        tuners = [each.tune for each in on_gpus]
        landed = _landing(store, device, prune)
        # Workers of one database share each problem; without it a problem is one tuner's.
        locks = TaskLocks(store.root / LOCKS) if storage is None else None
        return _followed(
            chosen, store, tuners, names, again, environment_of, watch, landed, until, locks
        )


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
        tuners = [plugin.tuner(watch.lane(), effort, method)]
        return _followed(
            chosen, store, tuners, ["the instance"], again, where, watch, lambda record: None
        )


def _forget(chosen: Sequence[AnyTask], store: Store) -> None:
    """Journals of records that are there: a process died between writing one and dropping it."""
    for task in chosen:
        where, key = environment_of(task), key_of(task.problem)
        if (old := store.read(where, key)) is not None:
            settle(store.root / JOURNALS, old, store.path(where, key).stat().st_mtime)


def _landing(store: Store, device: Device, prune: bool) -> Callable[[Record], None]:
    """What is kept until a record is on the disk, and is dropped then."""
    served = {each.store.root.resolve() for each in layers(device)}

    def landed(record: Record) -> None:
        settle(store.root / JOURNALS, record)
        if prune:
            store.drop_others(record.environment, record.key)
        # Elsewhere, or measured in another way, it is none that dispatch will take for its own.
        here = environment(recorded_kind(record.key.kind), device)
        if store.root.resolve() in served and record.environment == here:
            untuned.drop(record.key, device.name)

    return landed


def _followed(
    chosen: Sequence[AnyTask],
    store: Store,
    tuners: Sequence[TuneTask],
    names: Sequence[str],
    again: bool,
    where: Where,
    watch: Watch,
    landed: Callable[[Record], None],
    until: float = math.inf,
    locks: TaskLocks | None = None,
) -> Ran:
    found: list[TuningOutcome] = []
    gone: list[str] = []

    def lost(number: int, error: DeviceError) -> None:
        gone.append(f"{names[number]} is lost and took no more problems: {error.got}")
        watch.say(gone[-1])

    try:
        for outcome in campaign(
            chosen, store, tuners, again, where, landed, lost, until, locks, watch.say
        ):
            found.append(outcome)
            watch.finished(_line(outcome), outcome.status != "kept")
    except KeyboardInterrupt:
        return Ran(tuple(found), True, tuple(gone))
    return Ran(tuple(found), False, tuple(gone))


def _line(outcome: TuningOutcome) -> str:
    if outcome.answer is None:
        return f"{outcome.title}: failed: {outcome.message}"
    decision, config = outcome.answer.decision, short(outcome.answer.config)
    gain = "the static default" if decision.winner == decision.default else config
    by = " by the model" if outcome.answer.provenance == "model" else ""
    took = f" in {outcome.seconds:.0f} s" if outcome.status == "tuned" else ", kept"
    return f"{outcome.title}: {gain}, {decision.speedup:.3f}x{by}{took}"
