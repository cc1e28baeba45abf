"""Evaluator: what is done to candidates one after the other: build, gate, screen, finals."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from flexattn import __version__
from flexattn.errors import MeasureError
from flexattn.kernels.base.config import Config, describe
from flexattn.kernels.base.family import Effort
from flexattn.kernels.choose.defaults import Survey, reasons, survey
from flexattn.measure.task import Measurer, Task
from flexattn.records.record import (
    Decision,
    Environment,
    Failed,
    Key,
    Policy,
    Provenance,
    Record,
    Trial,
    key_of,
    sizes_of,
)
from flexattn.tuning.builds import BuiltConfig
from flexattn.tuning.race import CONFIDENCE, MARGIN, TrialTable, race_trials, screen
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
    fitting = (each for each in seeds if not reasons(each, problem.structure, device))
    return surveyed(task, environment, survey(problem, device, effort), fitting)


def surveyed(
    task: Task, environment: Environment, found: Survey, more: Iterable[Config] = ()
) -> Subject:
    """The subject of a task whose space was found, with more configs that can run."""
    problem = task.problem
    return Subject(
        key=key_of(problem),
        sizes=sizes_of(problem),
        environment=environment,
        policy=task.policy,
        configs=tuple(dict.fromkeys([*found.configs, *more])),
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial with the hash of its machine code ("" where it was not built)."""

    trial: Trial
    code: str


NOT_TRIED = "not tried"

BuildConfigs = Callable[[Sequence[Config]], Iterable[BuiltConfig]]


@dataclass
class Evaluator:
    """One subject's table of trials, and what fills it.

    Its clock stands while configs are built and while the default passes the gate.
    """

    subject: Subject
    measurer: Measurer
    builder: BuildConfigs
    method: Method
    progress: Progress

    def __post_init__(self) -> None:
        self.table = TrialTable(self.subject.configs, self.subject.default)
        self.begin = time.monotonic()
        self._uncounted = 0.0
        self._told: set[int] = set()
        self._codes: dict[str, int] = {}
        self._code_of: dict[int, str] = {}

    def left(self, share: float = 1.0) -> float:
        """Seconds of the budget, or of a share of it, that are left."""
        measuring = time.monotonic() - self.begin - self._uncounted
        return share * self.method.budget_s - measuring

    def built(self, index: int) -> bool:
        """True if the config was built, or is known to need no build."""
        return index in self._code_of or self.table[index].failed is not None

    def build(self, indices: Iterable[int]) -> None:
        """Build configs; note resources, failures, and who has whose machine code."""
        missing = [i for i in indices if not self.built(i)]
        if not missing:
            return
        begin = time.monotonic()
        self.progress.stage("build", len(missing))
        found = {b.config: b for b in self.builder([self.table[i].config for i in missing])}
        for index in missing:
            self._note(index, found.get(self.table[index].config))
        self._uncounted += time.monotonic() - begin

    def _note(self, index: int, built: BuiltConfig | None) -> None:
        if built is None:
            self.table.fail(index, Failed("build", "Missing", "the builder gave no answer"))
            return
        trial = replace(
            self.table[index],
            registers=built.registers,
            spills=built.spills,
            shared_memory=built.shared_memory,
        )
        self.table.put(index, trial)
        starved = built.failed is not None and built.failed.stage == "resources"
        if built.failed is not None and not (starved and index == self.table.default):
            # The default runs where nothing was tuned: it is timed whatever it spills.
            self.table.fail(index, built.failed)
        self._identify(index, built.code)

    def _identify(self, index: int, code: str) -> None:
        """Remember a config's machine code; one that is known already will not be timed twice."""
        self._code_of[index] = code
        first = self._codes.setdefault(code, index) if code else index
        if first != index and self.table[index].failed is None:
            self.table.put(index, replace(self.table[index], same_code_as=first))

    def screen(self, batch: Sequence[int]) -> list[Entry]:
        """Build, gate and time a batch beside the default; its trials, that of the default first.

        The default's has the samples of this batch alone: others compare with them.
        """
        table, default = self.table, self.subject.default
        self.build(dict.fromkeys([default, *batch]))
        ready = [i for i in dict.fromkeys([default, *batch]) if self._passes(i)]
        before = len(table[default].screening)
        rounds, min_ms = self.method.rounds, min(SCREENING_MS, self.subject.policy.min_ms)
        timed = [i for i in ready if i != default]
        if ready and (timed or not before):
            screen(self.measurer, table, timed, rounds, min_ms)
        for index in batch:
            self.progress.step(describe(table[index].config), table.best_us())
        self._say_lost(batch)
        kept = [i for i in batch if i != default and self._touched(i)]
        own = replace(table[default], screening=table[default].screening[before:])
        return [Entry(own, self._code_of.get(default, "")), *map(self._entry, kept)]

    def _say_lost(self, indices: Iterable[int]) -> None:
        """Tell of each config once whose build or run ended its process."""
        for index in indices:
            failed = self.table[index].failed
            if failed is None or failed.stage not in ("crash", "hang") or index in self._told:
                continue
            self._told.add(index)
            name = describe(self.table[index].config)
            self.progress.note(f"{name}: {failed.stage} ({failed.error}); the others go on")

    def _passes(self, index: int) -> bool:
        """Gate a config that needs it, if there is time; the default always has time."""
        trial = self.table[index]
        if not self.table.healthy(index):
            return False
        if trial.gate is None and (index == self.subject.default or self.left(FOR_SCREENING) > 0):
            begin = time.monotonic()
            self.table.gate(index, self.measurer.gate(trial.config))
            if index == self.subject.default:
                # A worker's first run imports and loads what every later one finds there.
                self._uncounted += time.monotonic() - begin
        return self.table.healthy(index) and self.table[index].gate is not None

    def _touched(self, index: int) -> bool:
        trial = self.table[index]
        if trial.same_code_as is not None:
            return self._touched(trial.same_code_as)
        return trial.failed is not None or bool(trial.screening)

    def _entry(self, index: int) -> Entry:
        trial = replace(self.table[index], start=0, same_code_as=None)
        return Entry(trial, self._code_of.get(index, ""))

    def restore(self, entries: Sequence[Entry]) -> None:
        """Take over a batch that was timed elsewhere.

        Its times compare through the default's, or, where that one fails, with one another.
        """
        known = {config: index for index, config in enumerate(self.subject.configs)}
        default = self.subject.default
        there, here = entries[0].trial, self.table[default]
        if there.config != here.config:
            return
        if (there.failed and here.screening) or (here.failed and there.screening):
            return
        start = len(here.screening)
        for entry in entries:
            index = known.get(entry.trial.config)
            if index is None or (index != default and index in self._code_of):
                continue
            samples = entry.trial.screening
            if index != default or not start:
                self.table.put(index, replace(entry.trial, screening=(), start=0, finals=()))
                self._identify(index, entry.code)
            if samples:
                self.table.screened([index], [samples], start)

    def record(self) -> Record:
        """Race the finalists; raises MeasureError where the winner has no time."""
        subject, method, policy = self.subject, self.method, self.subject.policy
        self.progress.stage("race", policy.rounds)
        race_trials(
            self.measurer, self.table, policy.rounds, policy.min_ms,
            method.margin, method.confidence,
            expired=lambda: self.left() <= 0,
            said=lambda text: self.progress.step(text, self.table.best_us()),
        )  # fmt: skip
        self._say_lost(range(len(self.table)))
        trials, decision, untried = self.compacted()
        winner = trials[decision.winner]
        if winner.failed is not None or not (winner.screening or winner.finals):
            stages = Counter(
                f"{t.failed.stage}: {t.failed.error}" for t in trials if t.failed is not None
            )
            counted = ", ".join(f"{count} x {text}" for text, count in stages.most_common(5))
            raise MeasureError(
                f"no config of {subject.title or subject.key.kind} has a time",
                f"{len(trials)} were tried: {counted or 'none was timed'}",
                "see the first message: " + (winner.failed.message if winner.failed else ""),
            )
        return Record(
            key=subject.key,
            environment=subject.environment,
            policy=policy,
            provenance=method.provenance,
            sizes=subject.sizes,
            trials=trials,
            decision=decision,
            rejected=subject.rejected + ((NOT_TRIED, untried),) * (untried > 0),
            seconds=round(time.monotonic() - self.begin, 3),
            made=datetime.now(timezone.utc).date().isoformat(),
            tool=f"flexattn {__version__}",
            title=subject.title,
            note=method.note,
        )

    def compacted(self) -> tuple[tuple[Trial, ...], Decision, int]:
        """The trials that were tried, the decision as they stand, and how many were not tried."""
        kept = [i for i in range(len(self.table)) if i == self.subject.default or self._touched(i)]
        found = self.table.compact(kept, self.method.margin, self.method.confidence)
        return *found, len(self.table) - len(kept)
