"""Compile a problem's configs in parallel, on any machine, and say which are worth timing.

A Pool has processes that do one task each at a time; one that dies or hangs costs its task alone.
Threads share a pool, and it works ahead of them: what somebody waits for comes first.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

from flexattn.device import Device
from flexattn.errors import BuildError, MeasureError
from flexattn.kernels.base.config import Config
from flexattn.kernels.base.features import fp32_products
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.registry import family_of, launch_key
from flexattn.measure.process import Closing, Died, Spawned, pipe_of_child, receive, send
from flexattn.problem import Problem
from flexattn.records.record import Failed, Stage
from flexattn.runtime.build import compile_source
from flexattn.runtime.outcomes import memory, outcome_of
from flexattn.runtime.resources import Resources, code_hash, resources, spills_too_much
from flexattn.settings import compiler_environment, current, override
from flexattn.util.locks import renewed

# Seconds that a new process may take to import what its work needs, beside the task's own.
STARTUP = 120.0
_Work = Callable[[Any], Any]


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
        """Index and result of each task as it ends.

        A Failed is the result of a task whose process died or was killed at the deadline ("crash",
        "hang"), and of one that raised ("build"). Any number of threads may wait at once. Raises
        MeasureError where the pool is closed.
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
        if known is not None and known.done():
            result = known.result()
            if isinstance(result, Failed) and result.stage in ("crash", "hang"):
                known = None  # its process died
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
            ready = True
            while ready:
                ready, result = process.receive(patience)
                patience = self._deadline
            return result
        except Died as died:
            self._own.process = None
            with self._lock:
                self._processes.discard(process)
            return died.failed

    def _begun(self) -> Spawned:
        serve = "flexattn.tuning.builds:serve_tasks"
        process = self._own.process = Spawned(serve, self._work, self._environment())
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
    pipe = pipe_of_child(handle)
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
        return Failed("build", type(error).__name__, traceback.format_exc())


# Seconds that one config may compile for: most need one or two.
DEADLINE = 120.0


@dataclass(frozen=True, slots=True)
class BuiltConfig:
    """The result of compiling a config, or the reason why there is none.

    registers, stack, shared_memory: of a thread, of a thread in bytes, of a block in bytes.
    spills, loop_spills, matrix_instructions: counted in the code. code_hash: of the machine code.
    seconds: of compiling; 0 where another config has the same source. failed: also for a kernel
    that compiles and is not worth timing, whose stage is then "resources".
    """

    config: Config
    registers: int = 0
    spills: int = 0
    loop_spills: int = 0
    stack: int = 0
    shared_memory: int = 0
    matrix_instructions: int = 0
    code_hash: str = ""
    seconds: float = 0.0
    failed: Failed | None = None

    @property
    def code(self) -> str:
        """Equal for configs that a device cannot tell apart: one code, launched in one way.

        Empty where nothing was compiled.
        """
        if not self.code_hash:
            return ""
        launch = (*launch_key(self.config), self.shared_memory)
        return ":".join([self.code_hash[:32], *map(str, launch)])


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """The input of a building process: sources as text, for a device that need not be there."""

    config: Any
    source: Source
    companion: Source | None
    device: Device
    cache_dir: Path

    @property
    def name(self) -> tuple[str, str, str]:
        """Equal for orders that have one result."""
        companion = "" if self.companion is None else self.companion.hash
        return self.source.hash, companion, self.device.arch


_Compiled: TypeAlias = tuple[Resources, str, float] | Failed


def build_all(
    problem: Problem,
    configs: Sequence[Config],
    device: Device,
    jobs: int = 0,
    *,
    deadline: float = DEADLINE,
    say: Callable[[BuiltConfig], None] = lambda built: None,
    work: Callable[[BuildOrder], _Compiled] | None = None,
    pool: Pool | None = None,
) -> list[BuiltConfig]:
    """Compile configs in processes of their own; the results in the order of the configs.

    jobs: 0 for one process a core. say: called with each result as it comes. work: what a process
    does. pool: one of `compilers`, that lives on and has its own jobs, deadline and work. Configs
    with one source are compiled once. Triton's cache then has every kernel: another process of
    this Triton compiles none again.
    """
    orders: dict[Hashable, BuildOrder] = {}
    places: dict[Hashable, list[int]] = {}
    for index, order in enumerate(orders_for(problem, configs, device)):
        orders.setdefault(order.name, order)
        places.setdefault(order.name, []).append(index)
    found = [BuiltConfig(config) for config in configs]
    matrix = fp32_products(problem.structure) != "ieee"
    own = pool or Pool(work or compile_one, min(jobs or default_jobs(), len(orders)), deadline)
    with nullcontext(own) if pool else own:
        wanted = list(orders.values())
        for number, result in own.run(wanted):
            for position, index in enumerate(places[wanted[number].name]):
                built = _built(configs[index], result, matrix, device)
                found[index] = replace(built, seconds=0.0) if position else built
                say(found[index])
    return found


def orders_for(
    problem: Problem, configs: Sequence[Config], device: Device
) -> Iterator[BuildOrder]:
    """The orders of a building process, one for each config."""
    structure, title = problem.structure, f"{problem.describe()} for {device.arch}"
    for config in configs:
        family = family_of(config)
        source, *merges = family.sources(structure, config, device, title)
        companion = merges[0] if merges else None
        yield BuildOrder(config, source, companion, device, current().cache_dir)


def compilers(jobs: int = 0) -> Pool:
    """Processes for many calls of build_all; they start when there is work. 0 jobs: one a core."""
    return Pool(compile_one, jobs or default_jobs(), DEADLINE)


def compile_one(order: BuildOrder) -> _Compiled:
    """One kernel, and decode's second one, in this process: its resources, code hash, seconds.

    What is refused for good is infeasible, and remembered: neither a tuner nor a call compiles it
    again. What may pass failed to build.
    """
    with override(cache_dir=order.cache_dir):
        begin, source = time.perf_counter(), order.source
        known = memory().find(source, order.device)
        if known is not None and not known.built:
            return Failed("infeasible", known.kind, known.reason)
        try:
            compiled = compile_source(source, order.device)
            if order.companion is not None:
                source = order.companion
                compile_source(source, order.device)
            seconds = time.perf_counter() - begin
            return resources(compiled, order.device), code_hash(compiled, order.device), seconds
        except BuildError as error:
            outcome = outcome_of(error)
            memory().note(source, order.device, outcome, order.source.text.split("\n", 1)[0])
            stage: Stage = "build" if outcome.kind == "passing" else "infeasible"
            return Failed(stage, type(error.__cause__ or error).__name__, str(error))


def unfit(taken: Resources, matrix: bool, device: Device) -> Failed | None:
    """The reason why a kernel that compiled is not worth timing; None where it is.

    The one rule of ranking before there is a time: it must fit, work out of registers, and
    multiply by matrix instructions where its dtype has them (`matrix`).
    """
    if taken.shared > device.shared_memory:
        text = f"{taken.shared} bytes of shared memory, {device.name} has {device.shared_memory}"
        return Failed("resources", "shared memory", text)
    if spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack):
        text = f"{taken.loop_spills} spills in loops, {taken.stack} bytes of stack a thread"
        return Failed("resources", "spills", text)
    if taken.serialised:
        text = f"ptxas warns {', '.join(taken.serialised)}: products wait for each other"
        return Failed("resources", "serialised wgmma", text)
    if matrix and not taken.matrix_instructions:
        return Failed("resources", "no matrix instruction", "tiles are multiplied without one")
    return None


def _built(config: Config, result: Any, matrix: bool, device: Device) -> BuiltConfig:
    if isinstance(result, Failed):
        return BuiltConfig(config, failed=result)
    taken, digest, seconds = result
    return BuiltConfig(
        config,
        registers=taken.registers,
        spills=taken.spills,
        loop_spills=taken.loop_spills,
        stack=taken.stack,
        shared_memory=taken.shared,
        matrix_instructions=taken.matrix_instructions,
        code_hash=digest,
        seconds=seconds,
        failed=unfit(taken, matrix, device),
    )
