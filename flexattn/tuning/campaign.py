"""Campaign: many problems into one store; what is done stays done, whatever happens later."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexattn.errors import DeviceError, FlexAttnError
from flexattn.measure.task import Task
from flexattn.records.environment import environment
from flexattn.records.record import Answer, Environment, Key, Record, key_of
from flexattn.records.store import Store
from flexattn.util.files import try_lock

Status = Literal["tuned", "kept", "failed"]
TuneTask = Callable[[Task], Record]
Where = Callable[[Task], Environment]

# Seconds between two looks at problems that other tuners measure.
_POLL_S = 0.3


@dataclass(frozen=True)
class TuningOutcome:
    """The outcome of one problem. kept: the store had its record already."""

    title: str
    key: Key
    status: Status
    answer: Answer | None
    seconds: float = 0.0
    message: str = ""


def environment_of(task: Task) -> Environment:
    """The environment in which a task's record holds exactly."""
    return environment(task.kind, task.device, task.policy)


def pending(
    tasks: Sequence[Task], store: Store, again: bool, where: Where = environment_of
) -> list[Task]:
    """The tasks that the store has no sound record of, or all of them."""
    return [task for task in tasks if again or _stored(task, store, where) is None]


def _stored(task: Task, store: Store, where: Where) -> Answer | None:
    return store.answer(where(task), key_of(task.problem))


@dataclass
class Campaign:
    """Tasks that are tuned, one at a time on each tuner; iterating says what became of each.

    A record is published when its problem is done. A task that raises a FlexAttnError or an
    OSError has failed and the others go on. A tuner that raises DeviceError is asked no more: its
    task goes to another one, and `lost` is told its number; what is left when all are lost has
    failed. KeyboardInterrupt goes through, and the same campaign later keeps what is there.
    again: tune and replace what is there instead, unless that would lose what was measured for
    what was made up. where: the environment that the tuners' records hold in. landed: told of each
    record once the store has it, or a better one; it does not raise. until: of the monotonic
    clock; no task begins after it, and those that did not have no outcome. locks: shared with
    other campaigns of this store. A task that one of them tunes waits, while others go on, and is
    kept if its record is there then; `say` is told of waiting. None where the tuners themselves
    share each task.
    """

    tasks: Sequence[Task]
    store: Store
    tuners: Sequence[TuneTask]
    again: bool = False
    where: Where = environment_of
    landed: Callable[[Record], None] = lambda record: None
    lost: Callable[[int, DeviceError], None] = lambda tuner, error: None
    until: float = math.inf
    locks: TaskLocks | None = None
    say: Callable[[str], None] = lambda text: None

    def __iter__(self) -> Iterator[TuningOutcome]:
        self._begin = time.time()
        # Tasks that have not begun; those that other campaigns tune stand last.
        self._left: deque[Task] = deque()
        for task in self.tasks:
            known = None if self.again else _stored(task, self.store, self.where)
            if known is None:
                self._left.append(task)
            else:
                yield _ended(task, "kept", known)
        try:
            yield from self._side_by_side()
        finally:
            if self.locks is not None:
                self.locks.release()

    def _side_by_side(self) -> Iterator[TuningOutcome]:
        """Each tuner has the next task when it is free; in threads, processes do the work."""
        idle = deque(range(len(self.tuners)))
        busy: dict[int, Task] = {}
        done: queue.SimpleQueue[tuple[int, TuningOutcome | BaseException]] = queue.SimpleQueue()
        errors: list[DeviceError] = []

        def work(number: int, task: Task) -> None:
            try:
                done.put((number, self._outcome(task, self.tuners[number])))
            except BaseException as error:  # the main thread raises it
                done.put((number, error))

        while True:
            if time.monotonic() >= self.until:
                self._left.clear()
            while self._left and idle and (task := self._next()) is not None:
                answer = self._made(task)
                if answer is not None:
                    self._release(task)
                    yield _ended(task, "kept", answer)
                    continue
                number = idle.popleft()
                busy[number] = task
                if len(self.tuners) == 1:
                    work(number, task)
                else:
                    threading.Thread(target=work, args=(number, task), daemon=True).start()
            blocked = bool(self._left and idle)
            if not busy and not blocked:
                break
            try:
                number, found = done.get(timeout=_POLL_S if blocked else None)
            except queue.Empty:
                continue
            task = busy.pop(number)
            self._release(task)
            if isinstance(found, DeviceError):
                self._left.appendleft(task)  # somebody else's next, if there is time
                errors.append(found)
                self.lost(number, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                idle.append(number)
                yield found
        for task in self._left:
            message = f"not tuned, no device is left: {errors[-1]}"
            yield _ended(task, "failed", None, message=message)

    def _outcome(self, task: Task, tune: TuneTask) -> TuningOutcome:
        begin = time.monotonic()
        try:
            record = tune(task)
            written = self.store.write(record, replace=_replaces)
        except DeviceError:  # no fault of the task
            raise
        except (FlexAttnError, OSError) as error:  # a disk that refuses the record, too
            return _ended(task, "failed", None, time.monotonic() - begin, str(error))
        self.landed(record)
        seconds = time.monotonic() - begin
        if written:
            return _ended(task, "tuned", record.answer, seconds)
        answer = self.store.answer(record.environment, record.key)
        return _ended(task, "kept", answer, seconds, "it was measured on a real mask")

    def _next(self) -> Task | None:
        """The next task that no other campaign tunes; None where others tune all that are left."""
        for _ in range(len(self._left)):
            task = self._left.popleft()
            if self.locks is None or self.locks.take(self._name(task)):
                return task
            self._left.append(task)
        self.say(
            f"waiting for {len(self._left)} that another tuner measures: {self._left[0].title}"
        )
        self.say = lambda text: None
        return None

    def _made(self, task: Task) -> Answer | None:
        """A task's record, if another campaign has tuned it."""
        try:
            written = self._path(task).stat().st_mtime
        except OSError:
            return None
        if self.again and written < self._begin:
            return None
        return _stored(task, self.store, self.where)

    def _release(self, task: Task) -> None:
        """Let other campaigns have a task, or see its record."""
        if self.locks is not None:
            self.locks.release([self._name(task)])

    def _name(self, task: Task) -> str:
        return str(self._path(task).relative_to(self.store.root))

    def _path(self, task: Task) -> Path:
        return self.store.path(self.where(task), key_of(task.problem))


def _ended(
    task: Task, status: Status, answer: Answer | None, seconds: float = 0.0, message: str = ""
) -> TuningOutcome:
    return TuningOutcome(task.title, key_of(task.problem), status, answer, seconds, message)


def _replaces(new: Record, old: Record) -> bool:
    """False if a record of made-up masks and tensors would replace a measured one."""
    return not (new.provenance == "untuned" and old.provenance == "measured")


class TaskLocks:
    """Locks in a folder, one for each name; those of a process that ends, however, are free.

    Advisory, of the kernel. Where the folder cannot be written, or its file system knows no locks,
    every lock is given: two tuners may then measure the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Hold a lock until it is released; False where somebody else holds it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = try_lock(self._path(name))
        except OSError:
            return True
        if handle is None:
            return False
        self._held[name] = handle
        return True

    def release(self, names: Sequence[str] | None = None) -> None:
        """Let others have these, or all that are held."""
        for name in list(self._held) if names is None else names:
            handle = self._held.pop(name, None)
            if handle is not None:
                # The file first: whoever waits for it finds that it is gone, and makes another.
                with contextlib.suppress(OSError):
                    self._path(name).unlink()
                os.close(handle)

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
