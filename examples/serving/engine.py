"""Scheduler and runner together: steps, one after the other, and requests that come in between.

All of it belongs to one thread, or one event loop, so that nothing is locked. Only the device's
part of a step runs elsewhere: a thread, in which it waits for the GPU, while the loop reads and
writes sockets. What is submitted or cancelled then counts from the next step on.
"""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from examples.serving.request import Refused, Request, Token
from examples.serving.runner import Runner
from examples.serving.scheduler import Scheduler, Step

log = logging.getLogger(__name__)


class Watch(Protocol):
    """What is told how requests fare; metrics.py counts it."""

    def stepped(self, step: Step, seconds: float) -> None: ...

    def gave(self, request: Request, first: bool, seconds: float) -> None: ...

    def ended(self, request: Request) -> None: ...


class Unwatched:
    """A Watch that nobody reads."""

    def stepped(self, step: Step, seconds: float) -> None: ...

    def gave(self, request: Request, first: bool, seconds: float) -> None: ...

    def ended(self, request: Request) -> None: ...


class Engine:
    """Serves requests: `step` in a loop of the caller's, or `serve` as a task."""

    def __init__(self, scheduler: Scheduler, runner: Runner, watch: Watch | None = None) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.watch: Watch = watch or Unwatched()
        self.failure: BaseException | None = None
        self._work = asyncio.Event()

    def submit(self, request: Request) -> None:
        """Take a request. Raises Refused, also where an earlier step has failed."""
        if self.failure is not None:
            raise Refused("failed", f"the engine has stopped: {self.failure}")
        self.scheduler.submit(request)
        self._work.set()

    def cancel(self, id: str) -> bool:
        """End a request before the next step; False where none of this id is known."""
        return self.scheduler.cancel(id)

    def step(self) -> bool:
        """Run one step; False where there was nothing to run."""
        step = self._begin()
        if step is None:
            return False
        began = time.monotonic()
        self._finish(step, self.runner.run(step), began)
        return True

    async def serve(self) -> None:
        """Run steps as long as there is work, and wait for more. Raises what a step raises."""
        loop = asyncio.get_running_loop()
        # One thread for all steps: torch, cuBLAS and malloc keep memory for each that they see.
        with ThreadPoolExecutor(1) as thread:
            try:
                while True:
                    step = self._begin()
                    if step is None:
                        self._work.clear()
                        await self._work.wait()
                        continue
                    began = time.monotonic()
                    given = await loop.run_in_executor(thread, self.runner.run, step)
                    self._finish(step, given, began)
            except Exception as error:
                self.failure = error
                log.exception("a step has failed, and no other will run")
                raise
            finally:
                self._tell(self.scheduler.fail())

    def _begin(self) -> Step | None:
        step, seated, gone = self.scheduler.schedule()
        self._tell(gone)
        for request in seated:
            self.runner.seat(request)
        return step

    def _finish(self, step: Step, given: list[Token | None], began: float) -> None:
        now = time.monotonic()
        for piece, token in zip(step.pieces, given, strict=True):
            request = piece.request
            if token is not None and not request.ended:
                first = not request.made
                self.watch.gave(request, first, now - (request.arrived if first else request.last))
                request.last = now
        self._tell(self.scheduler.took(step, given))
        self.watch.stepped(step, now - began)

    def _tell(self, gone: list[Request]) -> None:
        for request in gone:
            self.watch.ended(request)
