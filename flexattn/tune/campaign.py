"""Campaign: many problems into one store; what is done stays done, whatever happens later."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flexattn.cache.environment import environment
from flexattn.cache.key import Key, key_of
from flexattn.cache.record import Answer, Environment, Record
from flexattn.cache.store import Store
from flexattn.errors import FlexAttnError
from flexattn.measure.task import Task

__all__ = ["Outcome", "Tune", "campaign", "environment_of", "pending"]

Status = Literal["tuned", "kept", "failed"]
Tune = Callable[[Task], Record]
Where = Callable[[Task], Environment]


@dataclass(frozen=True)
class Outcome:
    """What became of one problem. kept: the store had its record already."""

    title: str
    key: Key
    status: Status
    answer: Answer | None
    seconds: float = 0.0
    message: str = ""


def environment_of(task: Task) -> Environment:
    """Where a task's record will hold exactly."""
    return environment(task.problem.structure.kind, task.device, task.policy)


def pending(
    tasks: Sequence[Task], store: Store, again: bool, where: Where = environment_of
) -> list[Task]:
    """The tasks that the store has no sound record of, or all of them."""
    return [task for task in tasks if again or _stored(task, store, where) is None]


def campaign(
    tasks: Sequence[Task],
    store: Store,
    tuners: Sequence[Tune],
    again: bool = False,
    where: Where = environment_of,
) -> Iterator[Outcome]:
    """Tune the tasks, one at a time on each tuner; a record is published when its problem is done.

    A task that raises a FlexAttnError or an OSError has failed and the others go on.
    KeyboardInterrupt goes through, and the same call later keeps what is there. again: tune and
    replace it instead, unless that would lose what was measured for what was made up.
    where: the environment that the tuners' records hold in.
    """
    todo = []
    for task in tasks:
        known = None if again else _stored(task, store, where)
        if known is None:
            todo.append(task)
        else:
            yield Outcome(task.title, key_of(task.problem), "kept", known)
    if len(tuners) == 1:
        for task in todo:
            yield _outcome(task, store, tuners[0])
    elif todo:
        yield from _side_by_side(todo, store, tuners)


def _outcome(task: Task, store: Store, tune: Tune) -> Outcome:
    key, begin = key_of(task.problem), time.monotonic()
    try:
        record = tune(task)
        written = store.write(record, replace=_replaces)
    except (FlexAttnError, OSError) as error:  # a disk that refuses the record, too
        return Outcome(task.title, key, "failed", None, time.monotonic() - begin, str(error))
    seconds = time.monotonic() - begin
    if not written:
        kept = store.answer(record.environment, key)
        return Outcome(task.title, key, "kept", kept, seconds, "it was measured on a real mask")
    return Outcome(task.title, key, "tuned", record.answer, seconds)


def _replaces(new: Record, old: Record) -> bool:
    """What was tuned from dispatch's list has a mask and captured tensors that were made up."""
    return not (new.provenance == "untuned" and old.provenance == "measured")


def _side_by_side(todo: Sequence[Task], store: Store, tuners: Sequence[Tune]) -> Iterator[Outcome]:
    """Each tuner takes the next task when it is free; threads, since processes do the work."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
    for task in todo:
        waiting.put(task)

    def work(tune: Tune) -> None:
        try:
            while True:
                done.put(_outcome(waiting.get_nowait(), store, tune))
        except queue.Empty:
            return
        except BaseException as error:  # the main thread raises it
            done.put(error)

    for tune in tuners:
        threading.Thread(target=work, args=(tune,), daemon=True).start()
    for _ in todo:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome


def _stored(task: Task, store: Store, where: Where) -> Answer | None:
    return store.answer(where(task), key_of(task.problem))
