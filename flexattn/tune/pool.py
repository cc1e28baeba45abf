"""Processes that do one task each at a time: one that dies or hangs costs its own task alone."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from flexattn.measure.process import Spawned
from flexattn.measure.wire import end_with_parent, receive, send
from flexattn.settings import compiler_environment
from flexattn.util.closing import Closing

# Seconds that a new process may take to import what its work needs, beside the task's own.
STARTUP = 120.0
_SERVE = (
    "import sys; from flexattn.tune.pool import serve_tasks; "
    "serve_tasks(int(sys.argv[1]), sys.argv[2])"
)

_Work = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Lost:
    """A task without a result: its process died, was killed at the deadline, or raised."""

    how: Literal["crash", "hang", "raised"]
    error: str
    message: str


@dataclass
class _Worker:
    process: Spawned
    task: int | None = None
    until: float = 0.0
    ready: bool = field(default=False)


class Pool(Closing):
    """At most `jobs` processes that call `work` on tasks, each within `deadline` seconds.

    work: a function of a module that a new process can import; tasks and results are pickled.
    Processes start when there is a task for them, and stay for the next `run` until `close`.
    environment: what makes theirs; without another they compile and see no GPU.
    """

    def __init__(
        self,
        work: _Work,
        jobs: int,
        deadline: float,
        environment: Callable[[], dict[str, str]] = compiler_environment,
    ) -> None:
        self._work = f"{work.__module__}:{work.__qualname__}"
        self._jobs, self._deadline = max(1, jobs), deadline
        self._environment = environment
        self._workers: list[_Worker] = []

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Index and result of each task as it ends; a task without a result gives a Lost.

        Whoever stops before the last one must close the pool.
        """
        waiting = deque(range(len(tasks)))
        while waiting or self.busy:
            while waiting and self.free:
                index = waiting.popleft()
                self.start(index, tasks[index])
            yield from self.ended()

    @property
    def busy(self) -> bool:
        """Whether a task is under way."""
        return any(worker.task is not None for worker in self._workers)

    @property
    def free(self) -> bool:
        """Whether a process is there for one more task, or may be started."""
        return len(self._workers) < self._jobs or any(w.task is None for w in self._workers)

    def start(self, number: int, task: Any) -> None:
        """Give a free process a task, whose end `ended` tells by this number."""
        worker = self._free()
        assert worker is not None
        worker.task, worker.until = number, time.monotonic() + self._deadline
        if not worker.ready:
            worker.until += STARTUP
        # A process that is already dead is found when its end of the pipe is read.
        with contextlib.suppress(OSError):
            send(worker.process.pipe, task)

    def close(self) -> None:
        """End every process, whatever it is doing."""
        for worker in list(self._workers):
            self._end(worker)

    def _free(self) -> _Worker | None:
        for worker in self._workers:
            if worker.task is None:
                return worker
        if len(self._workers) >= self._jobs:
            return None
        process = Spawned(("-c", _SERVE), self._work, self._environment())
        self._workers.append(_Worker(process))
        return self._workers[-1]

    def ended(self, patience: float = math.inf) -> Iterator[tuple[int, Any]]:
        """Wait until a process says something or is late, for `patience` seconds at most.

        Yields number and result of each task that ended by then.
        """
        busy = {worker.process.pipe: worker for worker in self._workers if worker.task is not None}
        nearest = min(worker.until for worker in busy.values())
        for pipe in wait(list(busy), min(patience, max(0.0, nearest - time.monotonic()))):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            task = worker.task
            assert task is not None
            try:
                ready, result = receive(pipe)
            except (EOFError, OSError):
                yield task, self._crashed(worker)
                continue
            if ready:
                worker.ready, worker.until = True, time.monotonic() + self._deadline
            else:
                worker.task = None
                yield task, result
        for worker in list(self._workers):
            if worker.task is not None and time.monotonic() >= worker.until:
                task = worker.task
                self._end(worker)
                message = f"no answer within {self._deadline:g} s, so its process was killed"
                yield task, Lost("hang", "Deadline", message)

    def _crashed(self, worker: _Worker) -> Lost:
        name = worker.process.ended(5.0)
        self._workers.remove(worker)
        return Lost(
            "crash", name, worker.process.told(f"the compiler's process ended with {name}")
        )

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.end()


def default_jobs() -> int:
    """One process for each core that this one may use."""
    return len(os.sched_getaffinity(0))


def serve_tasks(handle: int, where: str) -> None:
    """A process's life: a result for each task from the pipe with this handle, until it closes.

    where: "package.module:function", the work.
    """
    end_with_parent(handle, lambda: os.killpg(0, signal.SIGKILL))
    pipe: Connection[Any, Any] = Connection(handle)
    # Where times are taken meanwhile, the process that takes them comes first.
    os.nice(10)
    module, _, name = where.partition(":")
    work: _Work = getattr(importlib.import_module(module), name)
    with contextlib.suppress(EOFError, OSError):
        send(pipe, (True, None))
        while True:
            send(pipe, (False, _done(work, receive(pipe))))


def _done(work: _Work, task: Any) -> Any:
    try:
        return work(task)
    except Exception as error:  # whatever it was, the parent must hear of it
        return Lost("raised", type(error).__name__, traceback.format_exc())
