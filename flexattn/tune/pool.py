"""Pool: processes that do one task each at a time; one that dies or hangs costs its task alone.

Threads share a pool, and it works ahead of them: what somebody waits for comes first.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any, Literal

from flexattn.errors import MeasureError
from flexattn.measure.process import Spawned, end_with_parent, receive, send
from flexattn.settings import compiler_environment
from flexattn.util.closing import Closing
from flexattn.util.locks import renewed

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


class Pool(Closing):
    """At most `jobs` processes that call `work` on tasks, each within `deadline` seconds.

    work: a function of a module that a new process can import; tasks and results are pickled.
    Tasks with an equal `name` have one result, which is kept for whoever asks again; a task whose
    process died is tried anew then. Processes start when there is a task for them, and stay until
    `close`. environment: what makes theirs; without another they compile and see no GPU.
    """

    def __init__(
        self,
        work: _Work,
        jobs: int,
        deadline: float,
        environment: Callable[[], dict[str, str]] = compiler_environment,
    ) -> None:
        self._work = f"{work.__module__}:{work.__qualname__}"
        self._deadline, self._environment = deadline, environment
        # A thread for each process, which it alone talks to.
        self._threads = ThreadPoolExecutor(max(1, jobs))
        self._own = threading.local()
        self._processes: set[Spawned] = set()
        self._known: dict[Hashable, Future[Any]] = {}
        self._urgent: dict[Hashable, Any] = {}
        self._later: dict[Hashable, Any] = {}
        self._lock = renewed(threading.Lock())
        self._ended = ""
        renewed(self)

    def _at_fork_reinit(self) -> None:
        """A forked child has neither the threads nor the processes: who asks is told."""
        self._ended = "the compilers are those of the process that forked"

    def ahead(self, tasks: Iterable[Any]) -> None:
        """Do these when nothing is waited for, in order."""
        for task in tasks:
            with self._lock:
                self._future(task, self._later)

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Index and result of each task as it ends; a task without a result gives a Lost.

        Any number of threads may wait at once. Raises MeasureError where the pool is closed.
        """
        places: dict[Future[Any], list[int]] = {}
        with self._lock:
            for index, task in enumerate(tasks):
                places.setdefault(self._future(task, self._urgent), []).append(index)
        for future in as_completed(places):
            for index in places[future]:
                yield index, future.result()

    def close(self) -> None:
        """End every process, whatever it is doing."""
        with self._lock:
            self._ended = self._ended or "the compilers are closed"
            for name in (*self._urgent, *self._later):
                self._known[name].set_exception(_over(self._ended))
            self._urgent.clear()
            self._later.clear()
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()

    def _future(self, task: Any, queue: dict[Hashable, Any]) -> Future[Any]:
        """The result of a task, to come or there already; `queue` says how soon it is wanted."""
        name = getattr(task, "name", None) or object()
        known = self._known.get(name)
        if known is not None and known.done() and isinstance(known.result(), Lost):
            known = None
        if self._ended and (known is None or not known.done()):
            raise _over(self._ended)
        if known is None:
            known = self._known[name] = Future()
            queue[name] = task
            # With the settings of whoever asks.
            self._threads.submit(contextvars.copy_context().run, self._next)
        elif queue is self._urgent and name in self._later:
            queue[name] = self._later.pop(name)
        return known

    def _next(self) -> None:
        """Do what is wanted most."""
        with self._lock:
            waiting = self._urgent or self._later
            if not waiting:  # closed since
                return
            name = next(iter(waiting))
            task, future = waiting.pop(name), self._known[name]
        try:
            result = self._done(task)
        except Exception as error:  # no process can be started
            future.set_exception(_over(error))
        else:
            if self._ended:
                future.set_exception(_over(self._ended))
            else:
                future.set_result(result)

    def _done(self, task: Any) -> Any:
        """A task's result, from this thread's process."""
        process, patience = getattr(self._own, "process", None), self._deadline
        if process is None:
            process, patience = self._begun(), patience + STARTUP
        # A process that is already dead is found when its end of the pipe is read.
        with contextlib.suppress(OSError):
            send(process.pipe, task)
        try:
            while process.pipe.poll(patience):
                ready, result = receive(process.pipe)
                if not ready:
                    return result
                patience = self._deadline
        except (EOFError, OSError):
            name = process.ended(5.0)
            lost = Lost("crash", name, process.told(f"the compiler's process ended with {name}"))
        else:
            process.end()
            message = f"no answer within {self._deadline:g} s, so its process was killed"
            lost = Lost("hang", "Deadline", message)
        self._own.process = None
        with self._lock:
            self._processes.discard(process)
        return lost

    def _begun(self) -> Spawned:
        process = self._own.process = Spawned(("-c", _SERVE), self._work, self._environment())
        with self._lock:
            self._processes.add(process)
            if self._ended:
                process.kill()
        return process


def _over(why: object) -> MeasureError:
    return MeasureError(
        f"nothing compiles any more: {why}",
        "compilers run until the last problem is done",
        "start the same command again; what was finished is kept",
    )


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
    work: _Work = resolve_name(where)
    with contextlib.suppress(EOFError, OSError):
        send(pipe, (True, None))
        while True:
            send(pipe, (False, _done(work, receive(pipe))))


def _done(work: _Work, task: Any) -> Any:
    try:
        return work(task)
    except Exception as error:  # whatever it was, the parent must hear of it
        return Lost("raised", type(error).__name__, traceback.format_exc())
