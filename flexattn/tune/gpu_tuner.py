"""GpuTuner: what one GPU needs to tune problem after problem: a worker, first guesses."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from flexattn.errors import FlexAttnError
from flexattn.kernels.base.config import Config, describe
from flexattn.measure.task import AnyTask
from flexattn.measure.worker import Worker
from flexattn.records.key import Sizes, key_of
from flexattn.records.layers import layers, ranked, transferred
from flexattn.records.record import Record
from flexattn.tune.builds import BuiltConfig, build_task, orders_of
from flexattn.tune.campaign import environment_of
from flexattn.tune.compile_queue import CompileQueue, Runs
from flexattn.tune.method import Method
from flexattn.tune.progress import Progress
from flexattn.tune.shared import tune_shared
from flexattn.tune.subject import subject_of
from flexattn.tune.tuner import tune
from flexattn.util.closing import Closing

# Winners of other environments and of near sizes that are looked at first.
SEEDS = 6


def seeds(task: AnyTask) -> list[Config]:
    """Configs that did well nearby: records of other environments, then of near sizes."""
    problem, device = task.problem, task.device
    found = islice(ranked(key_of(problem), environment_of(task), layers(device)), SEEDS)
    configs = (
        transferred(each.answer.config, Sizes(*each.answer.sizes), problem, device)
        for each in found
    )
    return list(dict.fromkeys(configs))


def build_ahead(tasks: Sequence[AnyTask], method: Method, compile_queue: CompileQueue) -> None:
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
                    compile_queue.ahead(orders_of(task, subject.configs))
            except FlexAttnError:  # it is said when the task has its turn
                continue

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(order,), daemon=True).start()


class ProblemProgress(Progress, Protocol):
    """Progress that is told which problem it is about."""

    def problem(self, title: str) -> None:
        """The next problem begins."""


class GpuTuner(Closing):
    """Tunes tasks on one GPU, or in the interpreter; leaving it ends its worker.

    compilers: processes that compile, for this tuner and maybe others. journals: a folder that
    keeps what an interrupted problem had finished. gpu: of this host. storage: a database's URL;
    workers that name it tune each problem together. again_since: what they had finished before
    this moment, in seconds of the clock, is measured again.
    """

    def __init__(
        self,
        method: Method,
        compilers: Runs,
        journals: Path | None,
        progress: ProblemProgress,
        gpu: int = 0,
        storage: str | None = None,
        again_since: float | None = None,
    ) -> None:
        self._method, self._journals = method, journals
        self._compilers = compilers
        self._progress, self._storage = progress, storage
        self._again_since = again_since
        self._measurer = Worker(gpu=gpu, say=progress.note)

    def close(self) -> None:
        """End the worker."""
        self._measurer.close()

    def tune(self, task: AnyTask) -> Record:
        """One problem's record. Raises MeasureError where nothing can be timed."""
        self._progress.problem(task.title)

        def build(configs: Sequence[Config]) -> list[BuiltConfig]:
            if task.device.backend == "interpreter":
                return [BuiltConfig(config) for config in configs]
            return build_task(
                task,
                configs,
                say=lambda built: self._progress.step(describe(built.config)),
                pool=self._compilers,
            )

        if self._storage is not None:
            return tune_shared(
                task,
                self._measurer,
                build,
                self._storage,
                self._method,
                seeds=seeds(task),
                again_since=self._again_since,
                progress=self._progress,
            )
        return tune(
            task,
            self._measurer,
            build,
            self._method,
            seeds=seeds(task),
            journals=self._journals,
            progress=self._progress,
        )
