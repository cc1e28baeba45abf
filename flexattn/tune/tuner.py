"""tune(): survey, build, gate, screen, search, race, decide: one problem becomes one Record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from flexattn.errors import MeasureError
from flexattn.kernels.base.config import Config
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import AnyTask
from flexattn.records.record import Decision, Record, Trial
from flexattn.tune.campaign import environment_of
from flexattn.tune.evaluator import BuildConfigs, Evaluator
from flexattn.tune.journal import Journal
from flexattn.tune.method import FOR_SCREENING, Method
from flexattn.tune.progress import SILENT, Progress
from flexattn.tune.search import Everything, Guided, Search
from flexattn.tune.subject import Subject, subject_of

NOT_TRIED = "not tried"
USUAL = Method()


def tune(
    task: AnyTask,
    measurer: Measurer,
    build: BuildConfigs,
    method: Method = USUAL,
    *,
    seeds: Sequence[Config] = (),
    journals: Path | None = None,
    progress: Progress = SILENT,
) -> Record:
    """Tune one problem.

    build: configs to what their builds tell. seeds: configs to look at first, such as the
    neighbours' winners and the shipped ones. journals: a folder that keeps finished batches, so
    that the same call goes on after an interrupt; whoever has written the record drops them with
    `flexattn.tune.journal.settle`.
    Raises MeasureError where no config of the space runs.
    """
    subject = subject_of(task, environment_of(task), method.effort, seeds)
    journal = None if journals is None else Journal(journals, subject, method.provenance)
    measurer.start()
    # Its clock starts before the oracle is made, which the budget pays for.
    evaluator = Evaluator(subject, measurer, build, method, progress)
    measurer.open(task)
    return _tuned(evaluator, seeds, journal)


def tune_subject(
    subject: Subject,
    measurer: Measurer,
    build: BuildConfigs,
    method: Method = USUAL,
    *,
    seeds: Sequence[Config] = (),
    journal: Journal | None = None,
    progress: Progress = SILENT,
) -> Record:
    """As `tune`, for a subject whose task the measurer has open already."""
    return _tuned(Evaluator(subject, measurer, build, method, progress), seeds, journal)


def _tuned(evaluator: Evaluator, seeds: Sequence[Config], journal: Journal | None) -> Record:
    subject, method, progress = evaluator.subject, evaluator.method, evaluator.progress
    search = _search(subject, method, seeds)
    for entries in journal.batches() if journal else ():
        for index in evaluator.restore(entries):
            search.known(index, evaluator.table.cost(index))
    whole = isinstance(search, Everything)
    if whole:
        evaluator.build(range(len(subject.configs)))
    progress.stage("measure", search.total)
    while evaluator.left(FOR_SCREENING) > 0 or not evaluator.table.ranked():
        batch = search.ask(min(method.batch, search.batch))
        if not batch:
            break
        screened = evaluator.screen(batch)
        # Where nothing ran, as on a GPU that somebody else had filled, the next call tries again.
        if journal and any(entry.trial.screening for entry in screened):
            journal.append(screened)
        for index in batch:
            search.tell(index, evaluator.table.cost(index))
    else:
        progress.note("the time budget ended the search")
    if refused := evaluator.table.infeasible:
        progress.note(f"{refused} of {len(subject.configs)} configs are infeasible: refused")
    trials, decision, untried = evaluator.finals()
    seconds = time.monotonic() - evaluator.begin
    return record_of(subject, method, trials, decision, untried, seconds)


def record_of(
    subject: Subject,
    method: Method,
    trials: Sequence[Trial],
    decision: Decision,
    untried: int,
    seconds: float,
) -> Record:
    """The record of a finished race; raises MeasureError where the winner has no time."""
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
    rejected = subject.rejected + (((NOT_TRIED, untried),) if untried else ())
    return Record(
        key=subject.key,
        environment=subject.environment,
        policy=subject.policy,
        provenance=method.provenance,
        sizes=subject.sizes,
        trials=tuple(trials),
        decision=decision,
        rejected=rejected,
        seconds=round(seconds, 3),
        made=datetime.now(timezone.utc).date().isoformat(),
        tool=_tool(),
        title=subject.title,
        note=method.note,
    )


def _search(subject: Subject, method: Method, seeds: Sequence[Config]) -> Search:
    """All of a small space, the default first; of a large one what Optuna asks for."""
    first = [subject.default, *subject.index(seeds)]
    if len(subject.configs) <= method.all_up_to:
        return Everything(len(subject.configs), first)
    return Guided(
        subject.configs, first, limit=method.limit, sampler=method.sampler, seed=method.seed
    )


def _tool() -> str:
    try:
        return f"flexattn {metadata.version('flexattn')}"
    except metadata.PackageNotFoundError:
        return "flexattn"
