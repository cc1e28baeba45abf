"""GpuTuner: one problem becomes one Record. Campaign: many problems into one store.

What is done stays done, whatever happens later. Plugin is what tunes for devices that are no GPUs.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

from flexattn.device import Device
from flexattn.errors import DeviceError, FlexAttnError
from flexattn.kernels.base.config import Config, Fields, describe
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose import registry
from flexattn.kernels.choose.defaults import Survey
from flexattn.measure.process import Closing
from flexattn.measure.task import Measurer, Task
from flexattn.measure.worker import Worker
from flexattn.problem import Problem
from flexattn.records.environment import environment
from flexattn.records.layers import layers, ranked, transferred
from flexattn.records.record import Answer, Environment, Key, Record, Sizes, key_of
from flexattn.records.store import Store
from flexattn.runtime.launch import Outputs
from flexattn.tuning.builds import BuiltConfig, Pool, build_all, orders_for
from flexattn.tuning.evaluator import (
    FOR_SCREENING,
    SILENT,
    USUAL,
    BuildConfigs,
    Evaluator,
    Method,
    Progress,
    Subject,
    subject_of,
)
from flexattn.tuning.fleet import SharedTuning
from flexattn.tuning.search import Everything, Guided
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

    A record is published when its problem is done. If a task raises a FlexAttnError or an OSError,
    it has failed, and the others go on. If a tuner raises DeviceError, it gets no more tasks:
    another tuner gets its task, and `lost` gets its number. When no tuner is left, the other tasks
    have failed. KeyboardInterrupt is not caught, and the same campaign later keeps what is there.
    again: whether records that are there are replaced, except measured ones by made-up ones.
    where: the environment of the tuners' records. landed: called with each record when the store
    has it, or a better one; it does not raise. until: a time of the monotonic clock, after which
    no task begins; those tasks have no outcome. locks: shared with other campaigns of this store.
    If another campaign tunes a task, this one waits for its record and goes on with other tasks,
    and calls `say` when it waits. None if the tuners themselves share each task.
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


# Winners of other environments and of near sizes that are looked at first.
SEEDS = 6


def seeds(task: Task) -> list[Config]:
    """Configs that did well nearby: records of other environments, then of near sizes."""
    problem, device = task.problem, task.device
    found = islice(ranked(key_of(problem), environment_of(task), layers(device)), SEEDS)
    configs = (
        transferred(each.answer.config, Sizes(*each.answer.sizes), problem, device)
        for each in found
    )
    return list(dict.fromkeys(configs))


def build_ahead(tasks: Sequence[Task], method: Method, pool: Pool) -> None:
    """Order the kernels of tasks that will be measured whole, in the background.

    What is searched is built as the search asks for it: most of such a space is never measured.
    """

    def order() -> None:
        for task in tasks:
            if task.device.backend == "interpreter":
                continue
            try:
                subject = subject_of(task, environment_of(task), method.effort, seeds(task))
                if len(subject.configs) <= method.all_up_to:
                    pool.ahead(orders_for(task.problem, subject.configs, task.device))
            except FlexAttnError:  # it is said when the task has its turn
                continue

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(order,), daemon=True).start()


@dataclass
class GpuTuner(Closing):
    """Tunes tasks on one GPU, or in the interpreter; leaving it ends its worker.

    compilers: processes that compile, for this tuner and maybe others. gpu: of this host.
    storage: a database's URL. All workers that name it share each problem, by a study there, and
    each gets the one record.
    """

    method: Method
    compilers: Pool
    progress: Progress
    gpu: int = 0
    storage: str | None = None

    def __post_init__(self) -> None:
        self._measurer = Worker(gpu=self.gpu, say=self.progress.note)

    def close(self) -> None:
        """End the worker."""
        self._measurer.close()

    def tune(self, task: Task) -> Record:
        """One problem's record.

        Raises MeasureError where no config of the space runs, InputError for a storage that is no
        database's URL.
        """
        self.progress.problem(task.title)

        def build(configs: Sequence[Config]) -> list[BuiltConfig]:
            if task.device.backend == "interpreter":
                return [BuiltConfig(config) for config in configs]
            return build_all(
                task.problem,
                configs,
                task.device,
                say=lambda built: self.progress.step(describe(built.config)),
                pool=self.compilers,
            )

        first, shared = seeds(task), self.storage is not None
        environment, effort = environment_of(task), self.method.effort
        # A shared space is the effort's alone: seeds of one host do not widen it.
        subject = subject_of(task, environment, effort, () if shared else first)
        self._measurer.start()
        # Its clock starts before the oracle is made, which the budget pays for.
        evaluator = Evaluator(subject, self._measurer, build, self.method, self.progress)
        self._measurer.open(task)
        if self.storage is not None:
            return SharedTuning(evaluator, self.storage, first=subject.index(first)).run()
        return _tuned(evaluator, first)


def tune_subject(
    subject: Subject,
    measurer: Measurer,
    build: BuildConfigs,
    method: Method = USUAL,
    *,
    seeds: Sequence[Config] = (),
    progress: Progress = SILENT,
) -> Record:
    """Tune a subject whose task the measurer has open already. build: what its builds tell."""
    return _tuned(Evaluator(subject, measurer, build, method, progress), seeds)


def _tuned(evaluator: Evaluator, seeds: Sequence[Config]) -> Record:
    subject, method, progress = evaluator.subject, evaluator.method, evaluator.progress
    search = _search(subject, method, seeds)
    whole = isinstance(search, Everything)
    if whole:
        evaluator.build(range(len(subject.configs)))
    progress.stage("measure", search.total)
    while evaluator.left(FOR_SCREENING) > 0 or not evaluator.table.ranked():
        batch = search.ask(min(method.batch, search.batch))
        if not batch:
            break
        evaluator.screen(batch)
        for index in batch:
            search.tell(index, evaluator.table.cost(index))
    else:
        progress.note("the time budget ended the search")
    if refused := evaluator.table.infeasible:
        progress.note(f"{refused} of {len(subject.configs)} configs are infeasible: refused")
    return evaluator.record()


def _search(subject: Subject, method: Method, seeds: Sequence[Config]) -> Everything | Guided:
    """All of a small space, the default first; of a large one what Optuna asks for."""
    first = [subject.default, *subject.index(seeds)]
    if len(subject.configs) <= method.all_up_to:
        return Everything(len(subject.configs), first)
    return Guided(subject.configs, first, limit=method.limit, seed=method.seed)


class PluginKernel(NamedTuple):
    """A rendered kernel: its config, its text and file, the file of what merges its splits."""

    config: Fields
    text: str
    path: Path
    combine: Path | None


class Plugin(Protocol):
    """A module of these functions, flexattn.<backend>.plugin; they raise FlexAttnError."""

    def check_tuning(self, device: Device, effort: Effort, storage: str | None) -> None:
        """Refuse what a tuning for the device cannot be asked."""

    def survey_of(self, task: Task, effort: Effort) -> Survey:
        """The space of a task."""

    def tuner(
        self, device: Device, progress: Progress, effort: Effort, method: Method
    ) -> TuneTask:
        """A tuner for `campaign`; raises UnsupportedError where nothing can be measured."""

    def tuning_environment(self, task: Task) -> Environment:
        """The environment in which a record of `tuner` holds."""

    def render_kernel(self, problem: Problem, device: Device) -> PluginKernel:
        """The kernel of the first config that fits."""

    def write_kernel(self, task: Task, folder: Path) -> None:
        """Write the kernel of the first config that fits, with all that it is called with."""

    def attend(self, *call: Any) -> Outputs:
        """flex_attention of tensors on the device: an admitted call without gradients.

        call: q, k, v, the bound score_mod and mask_mod, block_mask, scale, and whether lse and
        max_scores are asked for, as a pair.
        """

    def rungs(self) -> Sequence[Any]:
        """The verifications of this machine: rows with name, proves, available and why."""


def plugin_of(backend: str) -> Plugin | None:
    """The plug-in of a device's backend, imported at its first use; None for a GPU."""
    return cast("Plugin | None", registry.plugin_module(backend))
