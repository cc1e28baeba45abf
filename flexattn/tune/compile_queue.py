"""CompileQueue: kernels compiled ahead of need, each source once, while others are measured."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from flexattn.errors import MeasureError
from flexattn.tune.pool import Lost, Pool
from flexattn.util.closing import Closing
from flexattn.util.locks import renewed

# Seconds between looks for more urgent work while some process has none.
LOOK = 0.05


class Order(Protocol):
    """A task of the pool."""

    @property
    def name(self) -> Hashable:
        """Equal for orders that have one result."""


class Runs(Protocol):
    """What does tasks: a Pool, or a CompileQueue over one."""

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """As Pool.run."""

    def close(self) -> None:
        """As Pool.close."""


class CompileQueue(Closing):
    """A pool that several threads share, and that works ahead of them.

    What somebody waits for comes first, then what was ordered ahead, in order. A result is kept
    for whoever asks again; a task whose process died is tried anew for the next one who asks.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._turn = threading.Condition()
        self._urgent: dict[Hashable, Order] = {}
        self._later: dict[Hashable, Order] = {}
        self._running: dict[int, Hashable] = {}
        self._done: dict[Hashable, Any] = {}
        self._broken: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._count = 0
        renewed(self)

    def _at_fork_reinit(self) -> None:
        """A forked child has neither the thread nor the processes: who waits hears of it."""
        self._turn = threading.Condition()
        self._broken = RuntimeError("the compilers are those of the process that forked")

    def ahead(self, orders: Iterable[Order]) -> None:
        """Compile these when nothing is waited for."""
        with self._turn:
            for order in orders:
                if not self._known(order.name):
                    self._later[order.name] = order
            self._wake()

    def run(self, tasks: Sequence[Order]) -> Iterator[tuple[int, Any]]:
        """As Pool.run, for any number of threads at once; results that are there come first."""
        places: dict[Hashable, list[int]] = {}
        for index, order in enumerate(tasks):
            places.setdefault(order.name, []).append(index)
        with self._turn:
            for order in tasks:
                if isinstance(self._done.get(order.name), Lost):
                    del self._done[order.name]
                if order.name not in self._done and order.name not in self._running.values():
                    self._later.pop(order.name, None)
                    self._urgent[order.name] = order
            self._wake()
        while places:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._stopped or not self._done.keys().isdisjoint(places)
                )
                ready = [name for name in places if name in self._done]
                if not ready:
                    raise MeasureError(
                        f"nothing compiles any more: {self._broken or 'the compilers are closed'}",
                        "compilers run until the last problem is done",
                        "start the same command again; what was finished is kept",
                    ) from self._broken
                results = {name: self._done[name] for name in ready}
            for name, result in results.items():
                for index in places.pop(name):
                    yield index, result

    def close(self) -> None:
        """End the pool's processes, whatever they are doing."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._pool.close()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._broken is not None

    def _known(self, name: Hashable) -> bool:
        return (
            name in self._done
            or name in self._urgent
            or name in self._later
            or name in self._running.values()
        )

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            # With the settings of whoever ordered first.
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._work,), daemon=True)
            self._thread.start()
        self._turn.notify_all()

    def _work(self) -> None:
        try:
            while self._start():
                if not self._running:
                    continue
                for number, result in self._pool.ended(LOOK if self._pool.free else 1.0):
                    with self._turn:
                        self._done[self._running.pop(number)] = result
                        self._turn.notify_all()
        except BaseException as error:  # those who wait must hear of it
            with self._turn:
                self._broken = error
                self._turn.notify_all()

    def _start(self) -> bool:
        """Give free processes what is wanted most; waits where nothing is; False at the end."""
        with self._turn:
            self._turn.wait_for(
                lambda: self._closed or self._urgent or self._later or self._running
            )
            if self._closed:
                return False
            while (self._urgent or self._later) and self._pool.free:
                waiting = self._urgent or self._later
                name = next(iter(waiting))
                order = waiting.pop(name)
                self._count += 1
                self._running[self._count] = name
                self._pool.start(self._count, order)
            return True
