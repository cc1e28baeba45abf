"""Processes of their own, with a pipe to each, and its messages: pickled frozen data."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from flexattn.errors import FlexAttnError, MeasureError
from flexattn.records.record import Failed, Stage
from flexattn.settings import log, worker_environment

_C = TypeVar("_C", bound="Closing")

_KEPT_BYTES = 16 << 10
# A process whose kernel spins is gone when the driver has stopped the kernel.
_REAP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """A method of the child's Runner, with its arguments."""

    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The child has a request: if it dies from now on, the request may be why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request that went well; before it, `race` sends its events."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The end of a request that did not.

    lost: the child cannot go on and exits. index: the config of a race that broke it.
    error: what the caller is told where it is the request that is wrong, and no config.
    begun: False where the child died before it had the request.
    """

    failed: Failed
    lost: bool = False
    index: int | None = None
    error: FlexAttnError | None = None
    begun: bool = True


def send(pipe: Connection[Any, Any], message: object) -> None:
    """Write one message. Raises OSError where the other side is gone.

    Plain pickle: the pipe's own would put the parent's tensors into shared memory.
    """
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection[Any, Any]) -> Any:
    """Read one message. Raises EOFError or OSError where the other side is gone."""
    return pickle.loads(pipe.recv_bytes())


def pipe_of_child(handle: int) -> Connection[Any, Any]:
    """A child's end of its pipe; the child and what it started are killed when its parent dies.

    handle: of a pipe whose other end the parent alone holds, so that it closes then.
    """
    waiter = select.poll()
    waiter.register(handle, 0)  # a hang-up is reported without being asked for

    def wait() -> None:
        waiter.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    return Connection(handle)


class Closing:
    """A context manager whose processes end in close(), however its block ends."""

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is held."""
        raise NotImplementedError


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

    def __init__(self, serve: str, what: str, environment: Mapping[str, str]) -> None:
        """serve: "module:function", its life; called with the handle of its pipe, and `what`."""
        module, _, name = serve.partition(":")
        code = f"import sys; from {module} import {name}; {name}(int(sys.argv[1]), sys.argv[2])"
        self.pipe: Connection[Any, Any]
        self.pipe, theirs = Pipe()
        # A file, and not a pipe that somebody would have to read.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), what],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # A group of its own, with the compilers that it starts; Ctrl-C is for the parent.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process still runs."""
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

    def receive(self, patience: float) -> Any:
        """The next message. Raises Died where it is gone, or silent for so many seconds."""
        try:
            if self.pipe.poll(patience):
                return receive(self.pipe)
        except (EOFError, OSError):
            raise self.died() from None
        self.end()
        raise Died(Failed("hang", "Deadline", self._told(f"silent for {patience:g} s, killed")))

    def died(self) -> Died:
        """The error of a process whose pipe is closed: a signal's name, or its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)  # the pipe closes a moment before the process is gone
        self.end()
        status = self._process.returncode or 0
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Died(Failed("crash", name, self._told(f"its process ended with {name}")))

    def _told(self, what: str) -> str:
        """The text `what`, with the last words of the process."""
        handle = self._printed.fileno()
        begin = max(0, os.fstat(handle).st_size - _KEPT_BYTES)
        words = os.pread(handle, _KEPT_BYTES, begin).decode(errors="replace")
        return f"{what}; its last words:\n{clipped(words, 1500)}" if words.strip() else what


class ChildProcess(Spawned):
    """A child that serves requests with a Runner on one GPU; not for two threads at once."""

    def __init__(self, runner: str, gpu: int, patience: float) -> None:
        """Start it, and wait for its runner. Raises MeasureError, or what the runner says."""
        serve = "flexattn.measure.runner:serve_runner"
        super().__init__(serve, runner, worker_environment(gpu))
        try:
            hello = self.receive(patience)
        except Died as died:
            raise MeasureError(f"the worker's child did not start: {died}") from died
        except BaseException:
            self.end()
            raise
        if isinstance(hello, ErrorReply):
            self.end()
            if hello.error is not None:
                raise hello.error
            raise MeasureError(f"{runner} did not start: {hello.failed.message}")
        self.device: str = hello.value

    def exchange(self, request: Request, patience: float) -> Iterator[Any]:
        """Its messages about a request, the first Begun, the last an Answer or a ErrorReply.

        patience: seconds it may be silent. Raises Died. Whoever stops before the last message
        must end the child.
        """
        # A child that does not read blocks the writer of a large task.
        watch = threading.Timer(patience, self.kill)
        watch.start()
        try:
            send(self.pipe, request)
        except OSError:
            raise self.died() from None
        finally:
            watch.cancel()
        while True:
            message = self.receive(patience)
            yield message
            if isinstance(message, (Reply, ErrorReply)):
                return


# After one of these every later CUDA call of the process fails (CUDA runtime API, cudaError_t).
_STICKY = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|hardware stack error"
    r"|invalid program counter|invalid address space|launch timed out|unspecified launch failure"
    r"|device-side assert|uncorrectable (ECC|NVLink)|cudaError(Illegal|Misaligned|LaunchFailure)"
    r"|operation not supported on global/shared address space"
    r"|hip(ErrorIllegalAddress|ErrorLaunchFailure)|CUDA error:? 7(00|02|1[0-9]|2[01])\b",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out of memory|CUDA error:? 2\b", re.IGNORECASE)
_RESOURCES = re.compile(r"out of resource|(needs? more|too much) shared memory", re.IGNORECASE)
_LAUNCH = re.compile(r"cuLaunchKernel|cuTensorMapEncodeTiled")
_LENGTH = 2000


def failed(error: str, message: str, stage: Stage) -> Failed:
    """The typed failure of an exception's class name and text.

    stage: where it was raised, for what its text does not say better.
    """
    return Failed(_stage(error, message) or stage, error, clipped(message))


def is_sticky(failure: Failed) -> bool:
    """True if the CUDA context that raised this is lost, and with it the process."""
    return failure.stage == "crash" or bool(_STICKY.search(failure.message))


def clipped(text: str, length: int = _LENGTH) -> str:
    """Text that a record can keep: its beginning and its end."""
    text = text.strip()
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _stage(error: str, message: str) -> Stage | None:
    if _STICKY.search(message):
        return "crash"
    if error in ("OutOfMemoryError", "MemoryError") or _MEMORY.search(message):
        return "memory"
    if error == "OutOfResources" or _RESOURCES.search(message):
        return "resources"
    if error in ("BuildError", "DriverError") and not _LAUNCH.search(message):
        return "build"
    return "infeasible" if error == "ConfigError" else None
