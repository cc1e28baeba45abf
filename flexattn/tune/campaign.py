"""Campaign: many problems into one store; what is done stays done, whatever happens later."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexattn.errors import DeviceError, FlexAttnError
from flexattn.measure.task import AnyTask
from flexattn.records.environment import environment
from flexattn.records.key import Key, key_of
from flexattn.records.record import Answer, Environment, Record
from flexattn.records.store import Store
from flexattn.tune.task_locks import TaskLocks

Status = Literal["tuned", "kept", "failed"]
TuneTask = Callable[[AnyTask], Record]
Where = Callable[[AnyTask], Environment]
Landed = Callable[[Record], None]
_Lost = Callable[[int, DeviceError], None]

# Seconds between two looks at problems that other tuners measure.
_POLL_S = 0.3


@dataclass(frozen=True)
class TuningOutcome:
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
    tuners: Sequence[TuneTask],
    again: bool = False,
    where: Where = environment_of,
    landed: Landed = lambda record: None,
    lost: _Lost = lambda tuner, error: None,
    until: float = math.inf,
    locks: TaskLocks | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[TuningOutcome]:
    """Tune the tasks, one at a time on each tuner; a record is published when its problem is done.

    A task that raises a FlexAttnError or an OSError has failed and the others go on. A tuner that
    raises DeviceError is asked no more: its task goes to another one, and `lost` is told its
    number; what is left when all are lost has failed. KeyboardInterrupt goes through, and the same
    call later keeps what is there. again: tune and replace it instead, unless that would lose
    what was measured for what was made up. where: the environment that the tuners' records hold
    in. landed: told of each record once the store has it, or a better one; it does not raise.
    until: of the monotonic clock; no task begins after it, and those that did not have no outcome.
    locks: shared with other campaigns of this store. A task that one of them tunes waits, while
    others go on, and is kept if its record is there then; `say` is told of waiting. None where
    the tuners themselves share each task.
    """
    begin = time.time()
    todo = []
    for task in tasks:
        known = None if again else _stored(task, store, where)
        if known is None:
            todo.append(task)
        else:
            yield TuningOutcome(task.title, key_of(task.problem), "kept", known)

    waiting = _Waiting(todo, store, where, locks, begin if again else None, say)
    try:
        yield from _side_by_side(waiting, store, tuners, landed, lost, until)
    finally:
        waiting.close()


def _outcome(task: AnyTask, store: Store, tune: TuneTask, landed: Landed) -> TuningOutcome:
    key, begin = key_of(task.problem), time.monotonic()
    try:
        record = tune(task)
        written = store.write(record, replace=_replaces)
    except DeviceError:  # no fault of the task
        raise
    except (FlexAttnError, OSError) as error:  # a disk that refuses the record, too
        return TuningOutcome(task.title, key, "failed", None, time.monotonic() - begin, str(error))
    landed(record)
    seconds = time.monotonic() - begin
    if not written:
        kept = store.answer(record.environment, key)
        return TuningOutcome(
            task.title, key, "kept", kept, seconds, "it was measured on a real mask"
        )
    return TuningOutcome(task.title, key, "tuned", record.answer, seconds)


def _replaces(new: Record, old: Record) -> bool:
    """What was tuned from dispatch's list has a mask and captured tensors that were made up."""
    return not (new.provenance == "untuned" and old.provenance == "measured")


class _Waiting:
    """The tasks that this campaign has not begun; those that others tune stand last."""

    def __init__(
        self,
        tasks: Sequence[AnyTask],
        store: Store,
        where: Where,
        locks: TaskLocks | None,
        since: float | None,
        say: Callable[[str], None],
    ) -> None:
        """since: of the clock; a record that is older is none. None: any record is one."""
        self.tasks = deque(tasks)
        self._store, self._where, self._since = store, where, since
        self._locks, self._say = locks, say

    def take(self) -> tuple[AnyTask, Answer | None] | None:
        """The next task that no other campaign tunes, and its record if one has tuned it.

        None where others tune all that are left.
        """
        for _ in range(len(self.tasks)):
            task = self.tasks.popleft()
            if self._locks is None or self._locks.take(self._name(task)):
                answer = self._made(task)
                if answer is not None:
                    self.release(task)
                return task, answer
            self.tasks.append(task)
        self._say(
            f"waiting for {len(self.tasks)} that another tuner measures: {self.tasks[0].title}"
        )
        self._say = lambda text: None
        return None

    def release(self, task: AnyTask) -> None:
        """Let other campaigns have a task, or see its record."""
        if self._locks is not None:
            self._locks.release([self._name(task)])

    def close(self) -> None:
        """Release every task."""
        if self._locks is not None:
            self._locks.release()

    def _name(self, task: AnyTask) -> str:
        return str(self._path(task).relative_to(self._store.root))

    def _made(self, task: AnyTask) -> Answer | None:
        try:
            written = self._path(task).stat().st_mtime
        except OSError:
            return None
        if self._since is not None and written < self._since:
            return None
        return _stored(task, self._store, self._where)

    def _path(self, task: AnyTask) -> Path:
        return self._store.path(self._where(task), key_of(task.problem))


def _side_by_side(
    waiting: _Waiting,
    store: Store,
    tuners: Sequence[TuneTask],
    landed: Landed,
    lost: _Lost,
    until: float,
) -> Iterator[TuningOutcome]:
    """Each tuner has the next task when it is free; in threads, since processes do the work."""
    idle = deque(range(len(tuners)))
    busy: dict[int, AnyTask] = {}
    done: queue.SimpleQueue[tuple[int, TuningOutcome | BaseException]] = queue.SimpleQueue()
    errors: list[DeviceError] = []

    def work(number: int, task: AnyTask) -> None:
        try:
            done.put((number, _outcome(task, store, tuners[number], landed)))
        except BaseException as error:  # the main thread raises it
            done.put((number, error))

    while True:
        if time.monotonic() >= until:
            waiting.tasks.clear()
        while waiting.tasks and idle:
            taken = waiting.take()
            if taken is None:
                break
            task, answer = taken
            if answer is not None:
                yield TuningOutcome(task.title, key_of(task.problem), "kept", answer)
                continue
            number = idle.popleft()
            busy[number] = task
            if len(tuners) == 1:
                work(number, busy[number])
            else:
                threading.Thread(target=work, args=(number, busy[number]), daemon=True).start()
        blocked = bool(waiting.tasks and idle)
        if not busy and not blocked:
            break
        try:
            number, found = done.get(timeout=_POLL_S if blocked else None)
        except queue.Empty:
            continue
        task = busy.pop(number)
        waiting.release(task)
        if isinstance(found, DeviceError):
            waiting.tasks.appendleft(task)  # somebody else's next, if there is time
            errors.append(found)
            lost(number, found)
        elif isinstance(found, BaseException):
            raise found
        else:
            idle.append(number)
            yield found
    for task in waiting.tasks:
        message = f"not tuned, no device is left: {errors[-1]}"
        yield TuningOutcome(task.title, key_of(task.problem), "failed", None, 0.0, message)


def _stored(task: AnyTask, store: Store, where: Where) -> Answer | None:
    return store.answer(where(task), key_of(task.problem))
