"""Spawned, a Python process with a pipe to it, and ChildProcess, one that measures on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from flexattn.errors import MeasureError
from flexattn.measure.failures import clipped
from flexattn.measure.wire import Reply, Request, Trouble, receive, send
from flexattn.records.record import Failed
from flexattn.settings import log, worker_environment

_KEPT_BYTES = 16 << 10
# A process whose kernel spins is gone when the driver has stopped the kernel.
_REAP_SECONDS = 30.0


class Died(Exception):
    """The child is gone, or was silent for too long and is killed; `failed` says how."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Spawned:
    """A Python process of its own, with a pipe to it; what it prints is kept.

    Not multiprocessing's: that would import the caller's script a second time, and devices are
    chosen by an environment that must stand before anything is imported.
    """

    def __init__(self, start: Sequence[str], what: str, environment: Mapping[str, str]) -> None:
        """start: the interpreter's arguments; its pipe's handle and `what` come behind them."""
        self.pipe: Connection[Any, Any]
        self.pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *start, str(theirs.fileno()), what],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # A group of its own, with the compilers that it starts; Ctrl-C is for the parent.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._words = _Words(self._process.stdout)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it, with the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and give everything back."""
        self.kill()
        self.pipe.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("process %d does not die; its GPU may stay busy", self.pid)

    def ended(self, patience: float) -> str:
        """How it ended, within a few seconds, in a word: a signal's name, or its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)  # the pipe closes a moment before the process is gone
        self.end()
        status = self._process.returncode or 0
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def told(self, what: str) -> str:
        """What became of it, with its last words."""
        words = self._words.last()
        return f"{what}; its last words:\n{words}" if words else what


class ChildProcess(Spawned):
    """A child that serves requests with a Runner on one GPU; not for two threads at once."""

    def __init__(self, runner: str, gpu: int, patience: float) -> None:
        """Start it, and wait for its runner. Raises MeasureError, or what the runner says."""
        super().__init__(("-m", "flexattn.measure.child"), runner, worker_environment(gpu))
        try:
            hello = self._receive(patience)
        except Died as died:
            raise MeasureError(f"the worker's child did not start: {died}") from died
        except BaseException:
            self.end()
            raise
        if isinstance(hello, Trouble):
            self.end()
            if hello.error is not None:
                raise hello.error
            raise MeasureError(f"{runner} did not start: {hello.failed.message}")
        self.device: str = hello.value

    def exchange(self, request: Request, patience: float) -> Iterator[Any]:
        """Its messages about a request, the first Begun, the last an Answer or a Trouble.

        patience: seconds it may be silent. Raises Died. Whoever stops before the last message
        must end the child.
        """
        # A child that does not read blocks the writer of a large task.
        watch = threading.Timer(patience, self.kill)
        watch.start()
        try:
            send(self.pipe, request)
        except OSError:
            raise self._died() from None
        finally:
            watch.cancel()
        while True:
            message = self._receive(patience)
            yield message
            if isinstance(message, (Reply, Trouble)):
                return

    def _receive(self, patience: float) -> Any:
        try:
            if self.pipe.poll(patience):
                return receive(self.pipe)
        except (EOFError, OSError):
            raise self._died() from None
        self.end()
        raise Died(Failed("hang", "Deadline", self.told(f"silent for {patience:g} s, killed")))

    def _died(self) -> Died:
        name = self.ended(1.0)
        return Died(Failed("crash", name, self.told(f"the worker's child ended with {name}")))


class _Words(threading.Thread):
    """Reads what a child prints, so that it never blocks on it, and keeps the end."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._kept = b""
        self.start()

    def run(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), _KEPT_BYTES):
                self._kept = (self._kept + chunk)[-_KEPT_BYTES:]

    def last(self) -> str:
        """The end of it; of a child that has ended, all that it still said."""
        self.join(timeout=1.0)
        return clipped(self._kept.decode(errors="replace"), 1500)
