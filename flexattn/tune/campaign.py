"""Campaign: many problems into one store; what is done stays done, whatever happens later."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flexattn.cache.environment import environment
from flexattn.cache.key import Key, key_of
from flexattn.cache.record import Answer, Environment, Record
from flexattn.cache.store import Store
from flexattn.errors import DeviceError, FlexAttnError
from flexattn.measure.task import AnyTask

__all__ = ["Outcome", "Tune", "campaign", "environment_of", "pending"]

Status = Literal["tuned", "kept", "failed"]
Tune = Callable[[AnyTask], Record]
Where = Callable[[AnyTask], Environment]
Landed = Callable[[Record], None]
Lost = Callable[[int, DeviceError], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one problem. kept: the store had its record already."""

    title: str
    key: Key
    status: Status
    answer: Answer | None
    seconds: float = 0.0
    message: str = ""


def environment_of(task: AnyTask) -> Environment:
    """Where a task's record will hold exactly."""
    return environment(task.kind, task.device, task.policy)


def pending(
    tasks: Sequence[AnyTask], store: Store, again: bool, where: Where = environment_of
) -> list[AnyTask]:
    """The tasks that the store has no sound record of, or all of them."""
    return [task for task in tasks if again or _stored(task, store, where) is None]


def campaign(
    tasks: Sequence[AnyTask],
    store: Store,
    tuners: Sequence[Tune],
    again: bool = False,
    where: Where = environment_of,
    landed: Landed = lambda record: None,
    lost: Lost = lambda tuner, error: None,
    until: float = math.inf,
) -> Iterator[Outcome]:
    """Tune the tasks, one at a time on each tuner; a record is published when its problem is done.

    A task that raises a FlexAttnError or an OSError has failed and the others go on. A tuner that
    raises DeviceError is asked no more: its task goes to another one, and `lost` is told its
    number; what is left when all are lost has failed. KeyboardInterrupt goes through, and the same
    call later keeps what is there. again: tune and replace it instead, unless that would lose
    what was measured for what was made up. where: the environment that the tuners' records hold
    in. landed: told of each record once the store has it, or a better one; it does not raise.
    until: of the monotonic clock; no task begins after it, and those that did not have no outcome.
    """
    todo = []
    for task in tasks:
        known = None if again else _stored(task, store, where)
        if known is None:
            todo.append(task)
        else:
            yield Outcome(task.title, key_of(task.problem), "kept", known)
    yield from _side_by_side(todo, store, tuners, landed, lost, until)


def _outcome(task: AnyTask, store: Store, tune: Tune, landed: Landed) -> Outcome:
    key, begin = key_of(task.problem), time.monotonic()
    try:
        record = tune(task)
        written = store.write(record, replace=_replaces)
    except DeviceError:  # no fault of the task
        raise
    except (FlexAttnError, OSError) as error:  # a disk that refuses the record, too
        return Outcome(task.title, key, "failed", None, time.monotonic() - begin, str(error))
    landed(record)
    seconds = time.monotonic() - begin
    if not written:
        kept = store.answer(record.environment, key)
        return Outcome(task.title, key, "kept", kept, seconds, "it was measured on a real mask")
    return Outcome(task.title, key, "tuned", record.answer, seconds)


def _replaces(new: Record, old: Record) -> bool:
    """What was tuned from dispatch's list has a mask and captured tensors that were made up."""
    return not (new.provenance == "untuned" and old.provenance == "measured")


def _side_by_side(
    todo: Sequence[AnyTask],
    store: Store,
    tuners: Sequence[Tune],
    landed: Landed,
    lost: Lost,
    until: float,
) -> Iterator[Outcome]:
    """Each tuner has the next task when it is free; in threads, since processes do the work."""
    waiting, idle = deque(todo), deque(range(len(tuners)))
    busy: dict[int, AnyTask] = {}
    done: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()
    errors: list[DeviceError] = []

    def work(number: int, task: AnyTask) -> None:
        try:
            done.put((number, _outcome(task, store, tuners[number], landed)))
        except BaseException as error:  # the main thread raises it
            done.put((number, error))

    while True:
        if time.monotonic() >= until:
            waiting.clear()
        while waiting and idle:
            number = idle.popleft()
            busy[number] = waiting.popleft()
            if len(tuners) == 1:
                work(number, busy[number])
            else:
                threading.Thread(target=work, args=(number, busy[number]), daemon=True).start()
        if not busy:
            break
        number, found = done.get()
        task = busy.pop(number)
        if isinstance(found, DeviceError):
            waiting.appendleft(task)  # somebody else's next, if there is time
            errors.append(found)
            lost(number, found)
        elif isinstance(found, BaseException):
            raise found
        else:
            idle.append(number)
            yield found
    for task in waiting:
        message = f"not tuned, no device is left: {errors[-1]}"
        yield Outcome(task.title, key_of(task.problem), "failed", None, 0.0, message)


def _stored(task: AnyTask, store: Store, where: Where) -> Answer | None:
    return store.answer(where(task), key_of(task.problem))
