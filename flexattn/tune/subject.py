"""Subject: one problem as the tuner sees it, configs to choose from and the names they go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.cache.key import Key, key_of, sizes_of
from flexattn.cache.record import Environment, Policy
from flexattn.measure.task import Task
from flexattn.space.config import Config
from flexattn.space.triton import Effort, default, reasons, survey

__all__ = ["Subject", "subject_of"]


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
    task: Task, environment: Environment, effort: Effort = "full", seeds: Sequence[Config] = ()
) -> Subject:
    """The space of a task at an effort, with the default and the seeds that can run in it."""
    problem, device = task.problem, task.device
    found = survey(problem, device, effort)
    first = default(problem, device)
    fitting = [each for each in seeds if not reasons(each, problem.structure, device)]
    configs = tuple(dict.fromkeys([first, *found.configs, *fitting]))
    return Subject(
        key=key_of(problem),
        sizes=sizes_of(problem),
        environment=environment,
        policy=task.policy,
        configs=configs,
        default=0,
        rejected=found.rejected,
        title=task.title,
    )
