"""Crew: what one GPU needs to tune problem after problem: a worker, a builder, first guesses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from flexattn.cache.key import Sizes, key_of
from flexattn.cache.layers import layers, ranked, transferred
from flexattn.cache.record import Record
from flexattn.closing import Closing
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import Task
from flexattn.measure.worker import Worker
from flexattn.space.config import Config, describe
from flexattn.tune.builds import Built, build_all, compilers
from flexattn.tune.campaign import environment_of
from flexattn.tune.method import Method
from flexattn.tune.progress import Progress
from flexattn.tune.shared import tune_shared
from flexattn.tune.tuner import tune

__all__ = ["Crew", "seeds"]

# Winners of other environments and of near sizes that are looked at first.
SEEDS = 6


def seeds(task: Task) -> list[Config]:
    """Configs that did well nearby: records of other environments, then of near sizes."""
    problem, device = task.problem, task.device
    found = ranked(key_of(problem), environment_of(task), layers(device))
    configs = (
        transferred(each.answer.config, Sizes(*each.answer.sizes), problem, device)
        for each in islice(found, SEEDS)
    )
    return list(dict.fromkeys(configs))


class Lane(Progress, Protocol):
    """Progress that is told which problem it is about."""

    def problem(self, title: str) -> None:
        """The next problem begins."""


class Crew(Closing):
    """Tunes tasks on one GPU, or in the interpreter; leaving it ends its processes.

    jobs: processes that compile, 0 for as many as there are cores. journals: a folder that keeps
    what an interrupted problem had finished. measurer: a Worker of this host's GPU if None.
    storage: a database's URL; workers that name it tune each problem together. again_since: what
    they had finished before this moment, in seconds of the clock, is measured again.
    """

    def __init__(
        self,
        method: Method,
        jobs: int,
        journals: Path | None,
        progress: Lane,
        measurer: Measurer | None = None,
        gpu: int = 0,
        storage: str | None = None,
        again_since: float | None = None,
    ) -> None:
        self._method, self._journals = method, journals
        self._compilers = compilers(jobs)
        self._progress, self._storage = progress, storage
        self._again_since = again_since
        self._measurer = measurer or Worker(gpu=gpu, say=progress.note)

    def close(self) -> None:
        """End every process."""
        self._compilers.close()
        self._measurer.close()

    def tune(self, task: Task) -> Record:
        """One problem's record. Raises MeasureError where nothing can be timed."""
        self._progress.problem(task.title)

        def build(configs: Sequence[Config]) -> list[Built]:
            if task.device.backend == "interpreter":
                return [Built(config) for config in configs]
            return build_all(
                task.problem,
                configs,
                task.device,
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
