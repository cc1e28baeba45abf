"""GpuTuner: one problem becomes one Record; and what tunes for devices that are no GPUs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from flexattn.device import Device
from flexattn.errors import FlexAttnError
from flexattn.kernels.base.config import Config, Fields, describe
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose import registry
from flexattn.kernels.choose.defaults import Survey
from flexattn.measure.process import Closing
from flexattn.measure.task import Measurer, Task
from flexattn.measure.worker import Worker
from flexattn.problem import Problem
from flexattn.records.layers import layers, ranked, transferred
from flexattn.records.record import Environment, Record, Sizes, key_of
from flexattn.runtime.launch import Outputs
from flexattn.tuning.builds import BuiltConfig, Pool, build_all, orders_for
from flexattn.tuning.campaign import TuneTask, environment_of
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
