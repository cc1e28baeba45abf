"""Subject: one problem as the tuner sees it, configs to choose from and the names they go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.kernels.base.config import Config
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import default, reasons, survey
from flexattn.measure.task import AnyTask
from flexattn.records.key import Key, key_of, sizes_of
from flexattn.records.record import Environment, Policy


@dataclass(frozen=True)
class Subject:
    """The feasible configs of a problem, which of them is the static default, and its key.

    rejected: how many configs were not feasible, by reason.
    """

    key: Key
    sizes: tuple[int, int, int]
    environment: Environment
    policy: Policy
    configs: tuple[Config, ...]
    default: int
    rejected: tuple[tuple[str, int], ...] = ()
    title: str = ""

    def index(self, configs: Sequence[Config]) -> list[int]:
        """Where these stand; those that are not among the subject's are left out."""
        known = {config: index for index, config in enumerate(self.configs)}
        return [known[config] for config in configs if config in known]


def subject_of(
    task: AnyTask, environment: Environment, effort: Effort = "full", seeds: Sequence[Config] = ()
) -> Subject:
    """The space of a task at an effort, with the default and the seeds that can run in it."""
    configs, rejected = space_of(task, effort, seeds)
    return Subject(
        key=key_of(task.problem),
        sizes=sizes_of(task.problem),
        environment=environment,
        policy=task.policy,
        configs=configs,
        default=0,
        rejected=rejected,
        title=task.title,
    )


def space_of(
    task: AnyTask, effort: Effort, seeds: Sequence[Config] = ()
) -> tuple[tuple[Config, ...], tuple[tuple[str, int], ...]]:
    """The configs of a task, the default first, and how many others each rule rejected."""
    problem, device = task.problem, task.device
    found = survey(problem, device, effort)
    fitting = [each for each in seeds if not reasons(each, problem.structure, device)]
    first = default(problem, device)
    return tuple(dict.fromkeys([first, *found.configs, *fitting])), found.rejected
