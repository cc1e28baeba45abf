"""Worker: measures in a child process of one GPU, and survives whatever a candidate does to it."""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexattn.errors import DeviceError, FlexAttnError, MeasureError
from flexattn.kernels.base.config import Config
from flexattn.measure.process import ChildProcess, Closing, Died, ErrorReply, Reply, Request
from flexattn.measure.task import Task
from flexattn.measure.timing import Dropped, RoundTime, Started
from flexattn.problem import Problem
from flexattn.records.record import Failed, Gated
from flexattn.settings import current, log, say_once
from flexattn.util.files import open_lock

# Deaths of a child that no config can be blamed for, in one call.
_UNEXPLAINED = 2


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a child may be silent before it is killed.

    start: until it has imported everything. open: until a task's oracle is there. gate: for one
    config, which may have to be compiled. step: for one value of a race, or one warm-up.
    """

    start: float = 180.0
    open: float = 300.0
    gate: float = 120.0
    step: float = 60.0


class Worker(Closing):
    """The Measurer of a GPU: asks a child process, kills it at a deadline, and starts another.

    runner: "package.module:Class" of the child's Runner. gpu: index among the GPUs this process
    sees. say: told when the worker waits for another tuner. A config whose child died or hung is
    a typed failure and never tried again on its problem; the others go on in the next child.
    """

    def __init__(
        self,
        runner: str = "flexattn.measure.runner:DeviceRunner",
        gpu: int = 0,
        deadlines: Deadlines | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._runner = runner
        self._gpu = gpu
        self._deadlines = deadlines or Deadlines()
        self._say = say
        self._task: Task | None = None
        self._child: ChildProcess | None = None
        self._is_open = False
        self._fatal: dict[tuple[Problem, Config], Failed] = {}
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, where there is one."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """As Measurer.start."""
        self._started()

    def open(self, task: Task) -> None:
        """As Measurer.open."""
        self._task = task
        self._is_open = False
        self._ready()

    def gate(self, config: Config) -> Gated | Failed:
        """As Measurer.gate."""
        known = self._known(config)
        if known is not None:
            return known
        got = self._ask(self._ready, Request("gate", (config,)), self._deadlines.gate)
        if isinstance(got, ErrorReply):
            return self._noted(config, got.failed)
        verdict: Gated | Failed = got.value
        return verdict

    def sample(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float = math.inf
    ) -> list[tuple[float, ...] | Failed]:
        """As Measurer.sample.

        A child that dies ends its race: the others run it again in the next child, so that values
        of one index are of one round.
        """
        found: dict[int, tuple[float, ...] | Failed] = {}
        for i, config in enumerate(configs):
            if (known := self._known(config)) is not None:
                found[i] = known
        unexplained = 0
        while running := [i for i in range(len(configs)) if i not in found]:
            asked = tuple(configs[i] for i in running), rounds, min_ms, limit_us
            leg = _Leg(len(running))
            trouble = self._race(Request("race", asked), leg)
            found |= {running[place]: each for place, each in leg.out.items() if each is not None}
            if trouble is None:
                for place, i in enumerate(running):
                    found.setdefault(i, tuple(leg.took[place]))
            elif trouble.index is not None:
                culprit = running[trouble.index]
                found[culprit] = self._noted(configs[culprit], trouble.failed)
            else:
                unexplained += 1
                if trouble.error is not None or unexplained > _UNEXPLAINED:
                    raise trouble.error or self._blamed(trouble.failed)
        return [found[i] for i in range(len(configs))]

    def close(self) -> None:
        """As Measurer.close: ends the child."""
        self._task = None
        self._end()

    def _known(self, config: Config) -> Failed | None:
        return None if self._task is None else self._fatal.get((self._task.problem, config))

    def _noted(self, config: Config, failure: Failed) -> Failed:
        if failure.stage in ("crash", "hang") and self._task is not None:
            self._fatal[self._task.problem, config] = failure
        return failure

    def _ready(self) -> ChildProcess:
        """A child that has opened the task. Raises MeasureError, or why the task is refused."""
        if self._task is None:
            raise MeasureError("no task is open", "open(task) comes first, and close() last")
        child = self._started()
        if self._is_open:
            return child
        got = self._ask(self._started, Request("open", (self._task,)), self._deadlines.open)
        if isinstance(got, ErrorReply):
            raise got.error or self._blamed(got.failed)
        self._is_open = True
        assert self._child is not None
        return self._child

    def _started(self) -> ChildProcess:
        if self._child is not None and not self._child.alive:
            self._end()
        if self._child is None:
            try:
                self._child = ChildProcess(self._runner, self._gpu, self._deadlines.start)
            except FlexAttnError as error:
                got = f"nothing can be measured on GPU {self._gpu}: {error.got}"
                raise DeviceError(got, error.rule, error.do) from error
            self.starts += 1
        return self._child

    def _blamed(self, failure: Failed) -> MeasureError:
        """The error to raise where no config is the culprit; DeviceError where no child starts
        now.
        """
        self._started()
        return MeasureError(
            f"the worker's child failed ({failure.stage}, {failure.error}): {failure.message}",
            "a fresh child can open the task, and lives until a config runs",
            "look at the device (nvidia-smi, dmesg), then try again",
        )

    def _ask(
        self, where: Callable[[], ChildProcess], request: Request, patience: float
    ) -> Reply | ErrorReply:
        """Once more, in another child, where one dies before it has the request."""
        attempts = 1 + _UNEXPLAINED
        while True:
            child = where()
            with device_lock(child.device, alone=False, say=self._say):
                got = self._exchange(child, request, patience, _Leg(0))
            attempts -= 1
            if isinstance(got, Reply) or got.begun:
                return got
            if not attempts:
                raise self._blamed(got.failed)

    def _race(self, request: Request, leg: _Leg) -> ErrorReply | None:
        child = self._ready()
        with device_lock(child.device, alone=True, say=self._say):
            got = self._exchange(child, request, self._deadlines.step, leg)
        return got if isinstance(got, ErrorReply) else None

    def _exchange(
        self, child: ChildProcess, request: Request, patience: float, leg: _Leg
    ) -> Reply | ErrorReply:
        message: Any = None
        try:
            for message in child.exchange(request, patience):
                leg.add(message)
        except Died as died:
            begun = message is not None
            message = ErrorReply(died.failed, lost=True, index=leg.current, begun=begun)
        except BaseException:
            # Ctrl-C in the middle: an answer is still to come, which nobody would ask for.
            self._end()
            raise
        last: Reply | ErrorReply = message
        if isinstance(last, ErrorReply) and last.lost:
            self._end()
        return last

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None
        self._is_open = False


@dataclass
class _Leg:
    """A race as far as one child has run it.

    current: who runs. out: who left, with the failure, or None for the hopelessly slow.
    """

    size: int
    current: int | None = None
    out: dict[int, Failed | None] = field(default_factory=dict)
    took: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.took = [[] for _ in range(self.size)]

    def add(self, event: object) -> None:
        """Note what an event of the race says; other messages say nothing of it."""
        if isinstance(event, Started):
            self.current = event.index
        elif isinstance(event, RoundTime):
            self.took[event.index].append(event.us)
        elif isinstance(event, Dropped):
            self.out[event.index] = event.failure


@contextmanager
def device_lock(
    device: str, *, alone: bool, say: Callable[[str], None] = log.warning
) -> Iterator[None]:
    """Hold a device for a block of code, alone for timing, or beside others that do not time.

    Waits, and says so once, while somebody else holds it in the way. The lock is advisory, lies in
    the user's cache directory, and ends with the process that holds it. Where that directory takes
    no lock the block runs without, after one warning. "" locks nothing.
    """
    if not device:
        yield
        return
    path = current().cache_dir / "locks" / (re.sub(r"[^A-Za-z0-9_.-]", "_", device) + ".lock")
    handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_lock(path)
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {device}: another tuner of this host measures on it ({path})")
            fcntl.flock(handle, kind)
    except OSError as error:
        say_once(f"{path}: {error.strerror}: other tuners of this host may time on {device} too")
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
