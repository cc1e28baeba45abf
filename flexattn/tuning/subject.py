"""The subject and method of a tuning: its configs, its amount of work, a Progress to report to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.kernels.base.config import Config
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import reasons, survey
from flexattn.measure.task import Task
from flexattn.records.record import Environment, Key, Policy, Provenance, key_of, sizes_of
from flexattn.tuning.race import CONFIDENCE, MARGIN
from flexattn.tuning.search import ALL_UP_TO


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
        """The places of these configs; those that are not among the subject's are left out."""
        known = {config: index for index, config in enumerate(self.configs)}
        return [known[config] for config in configs if config in known]


def subject_of(
    task: Task, environment: Environment, effort: Effort = "full", seeds: Sequence[Config] = ()
) -> Subject:
    """The space of a task at an effort, with the default and the seeds that can run in it."""
    problem, device = task.problem, task.device
    found = survey(problem, device, effort)
    fitting = (each for each in seeds if not reasons(each, problem.structure, device))
    return Subject(
        key=key_of(problem),
        sizes=sizes_of(problem),
        environment=environment,
        policy=task.policy,
        configs=tuple(dict.fromkeys([*found.configs, *fitting])),
        default=0,
        rejected=found.rejected,
        title=task.title,
    )


# The part of a time budget after which no more are screened: the rest is for the finals.
FOR_SCREENING = 0.8
# Screening tells far apart from near; the finals take the policy's own, longer samples.
SCREENING_MS = 2.0


@dataclass(frozen=True)
class Method:
    """The method of tuning a problem. budget_s: of measuring; building and the first run are not.

    rounds: of the screening. batch: configs that are screened in one race, each of which holds its
    outputs and maybe a CUDA graph. all_up_to: spaces up to this size are measured whole, larger
    ones as far as the search asks for them, at most `limit` configs (None: a fifth).
    """

    effort: Effort = "full"
    budget_s: float = math.inf
    margin: float = MARGIN
    confidence: float = CONFIDENCE
    rounds: int = 5
    batch: int = 15
    all_up_to: int = ALL_UP_TO
    limit: int | None = None
    seed: int = 0
    provenance: Provenance = "measured"
    note: str = ""


USUAL = Method()


def method_for(effort: Effort, budget_s: float | None = None) -> Method:
    """The usual method of an effort: quick ends within ten seconds, exhaustive leaves none out."""
    if effort == "quick":
        return Method(effort, 8.0 if budget_s is None else budget_s, rounds=3)
    limitless = math.inf if budget_s is None else budget_s
    if effort == "exhaustive":
        return Method(effort, limitless, all_up_to=2**31)
    return Method(effort, limitless)


class Progress:
    """A listener, which says nothing; the command line has one that draws."""

    def problem(self, title: str) -> None:
        """The next problem begins."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins that takes `total` steps; 0 where nobody knows."""

    def step(self, text: str, best_us: float | None = None) -> None:
        """One step is done; best_us is the best time so far, in microseconds."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


SILENT = Progress()
