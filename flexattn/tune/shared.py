"""tune_shared(): one problem tuned by any number of workers on any hosts, through a database."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

from flexattn.errors import CacheError, InputError
from flexattn.kernels.base.config import Config
from flexattn.measure.protocol import Measurer
from flexattn.measure.task import AnyTask
from flexattn.records.codec import decode, decode_record, encode, encode_record
from flexattn.records.record import Record, slug
from flexattn.tune.campaign import environment_of
from flexattn.tune.evaluator import BuildConfigs, Evaluator
from flexattn.tune.journal import Entry
from flexattn.tune.method import FOR_SCREENING, Method
from flexattn.tune.progress import SILENT, Progress
from flexattn.tune.search import SHARE, Axes, distributions, sampler_of
from flexattn.tune.shared_study import Heart, Held, Pulse, SharedStudy, connect, rounds
from flexattn.tune.subject import Subject, subject_of
from flexattn.tune.tuner import USUAL, record_of

# Points that one worker holds at once: as many as a race beside the default makes good use of.
HELD = 4
_POLL_S = 0.3
# Proposals that may be known or cannot be, before any free point is taken instead.
PROPOSALS = 4
PULSE = Pulse()
# Words that workers leave with a study: the budget is used up; when its record was made.
ENDED, FINISHED = "ended", "finished"


def tune_shared(
    task: AnyTask,
    measurer: Measurer,
    build: BuildConfigs,
    url: str,
    method: Method = USUAL,
    *,
    seeds: Sequence[Config] = (),
    again_since: float | None = None,
    progress: Progress = SILENT,
) -> Record:
    """As `tune`, with all workers that call this for the problem; each gets the one record.

    Workers measure different points, and one of them races the finalists on its GPU. The space is
    the effort's alone, seeds widen it not: they are looked at first. A budget that one worker has
    used up ends the search for all. again_since: a study that was finished before this moment
    (seconds of the clock) is left as it is and a new round of it begins, which all who ask so
    share. Raises InputError for a URL that is no database's.
    """
    subject = subject_of(task, environment_of(task), method.effort)
    measurer.start()
    evaluator = Evaluator(subject, measurer, build, method, progress)
    measurer.open(task)
    return Shared(subject, evaluator, url, PULSE, subject.index(seeds), again_since).run(HELD)


def study_name(subject: Subject, method: Method) -> str:
    """What workers must agree on to share a study: device, key, environment, policy and space.

    Provenance too: a mask and captures that were made up are not the user's.
    """
    same = (
        subject.key, subject.sizes, subject.environment, subject.policy, subject.configs,
        method.margin, method.confidence, method.rounds, method.provenance,
    )  # fmt: skip
    digest = hashlib.sha256(repr(same).encode()).hexdigest()[:24]
    return f"flexattn {slug(subject.environment.device)} {subject.key.kind} {digest}"


class Shared:
    """One worker's view of a study: what the others found goes into its own table."""

    def __init__(
        self,
        subject: Subject,
        evaluator: Evaluator,
        url: str,
        pulse: Pulse = PULSE,
        first: Sequence[int] = (),
        again_since: float | None = None,
    ) -> None:
        self.subject, self.evaluator, self._first = subject, evaluator, first
        self._method = evaluator.method
        self._axes = Axes(subject.configs)
        self._whole = len(subject.configs) <= self._method.all_up_to
        self._limit = len(subject.configs)
        if not self._whole:
            asked = self._method.limit or max(1, int(SHARE * self._limit))
            self._limit = min(self._limit, asked)
        storage = connect(url, pulse)
        self._heart = Heart(storage)
        name = self._round(storage, study_name(subject, self._method), again_since)
        # Workers that draw alike would propose alike.
        self._draw = random.Random(uuid.uuid4().int)
        self._study = SharedStudy(
            storage,
            self._heart,
            name,
            self._axes.params,
            lambda params: self._axes.find(params)[1],
            distributions(self._axes),
            sampler_of(self._method.sampler, self._draw.randrange(2**31)),
        )
        self._finals = self._race_of(storage, name)
        self._seen: set[int] = set()
        self._twins: list[tuple[Entry, ...]] = []

    def _race_of(self, storage: Any, name: str) -> SharedStudy:
        """The study of one point that whoever races the finalists owns."""
        return SharedStudy(
            storage, self._heart, f"{name} finals", lambda point: {}, lambda p: 0, {}
        )

    def _round(self, storage: Any, name: str, again_since: float | None) -> str:
        """The newest round of a study, or the one after it where that was finished before."""
        number = rounds(storage, name)
        newest = f"{name} round {number}" if number > 1 else name
        if again_since is None or not number:
            return newest
        finals = self._race_of(storage, newest)
        finished = finals.results() and (finals.noted(FINISHED) or 0.0) < again_since
        return f"{name} round {number + 1}" if finished else newest

    def run(self, held: int) -> Record:
        """Measure what is left, with the others; then race the finalists, or wait for who does."""
        self.evaluator.progress.stage("measure", self._limit)
        with self._heart:
            return self._run(held)

    def _run(self, held: int) -> Record:
        while True:
            batch, busy = self._ask(held)
            if batch:
                self._measure(batch)
                continue
            if not busy:
                record = self._race()
                if record is not None:
                    return record
            time.sleep(_POLL_S * (0.5 + self._draw.random()))

    def _ask(self, count: int) -> tuple[list[Held], bool]:
        """Points to measure; without any, whether others still measure some."""
        states = self._study.known()
        dead = [point for point, state in states.items() if state == "FAIL"]
        if self.evaluator.left(FOR_SCREENING) <= 0 and self._study.noted(ENDED) is None:
            self.evaluator.progress.note("the time budget ended the search")
            self._study.note(ENDED, True)
        ended = self._study.noted(ENDED) is not None and "COMPLETE" in states.values()
        room = 0 if ended else self._limit - len(states)
        batch = [held for point in dead[:count] if (held := self._study.take(point))]
        for _ in range(min(count - len(batch), room)):
            taken = states.keys() | {held.point for held in batch}
            if held := self._new([p for p in range(len(self._axes.points)) if p not in taken]):
                batch.append(held)
        busy = bool(dead) or "RUNNING" in states.values() or (room > 0 and not batch)
        return batch, busy

    def _new(self, free: Sequence[int]) -> Held | None:
        """A point that nobody owns: a seed, or any of a small space, or the sampler's proposal."""
        if seeds := [point for point in self._first if point in free]:
            return self._study.take(seeds[0])
        if not self._whole:
            for _ in range(PROPOSALS):
                if held := self._study.propose():
                    return held
        # Workers that take the same point lose a trial each: they begin at places of their own.
        return self._study.take(self._draw.choice(free)) if free else None

    def _measure(self, batch: Sequence[Held]) -> None:
        """Screen the points that this worker owns; tell each with the default's own times."""
        try:
            self._learn()
            default, *entries = self.evaluator.screen([held.point for held in batch])
            by_config = {entry.trial.config: entry for entry in entries}
            for held in batch:
                self._tell(held, default, by_config.get(self.subject.configs[held.point]))
        except BaseException:
            # Ctrl-C too: others need not wait for this heart to stop.
            self._study.give_back(batch)
            raise

    def _tell(self, held: Held, default: Entry, own: Entry | None) -> None:
        cost = self.evaluator.table.cost(held.point)
        entries = [default] if own is None else [default, own]
        text = json.dumps([encode(entry) for entry in entries])
        if self._study.tell(held, cost if math.isfinite(cost) else math.inf, text):
            self._seen.add(held.point)
        else:
            self.evaluator.progress.note(
                "a point was taken over by another worker; its time is void"
            )

    def _learn(self) -> None:
        """Take the others' results into this worker's table: what is known is not timed again."""
        for point, text in self._study.results().items():
            if point not in self._seen:
                self._seen.add(point)
                try:
                    self._twins.append(decode(tuple[Entry, ...], json.loads(text), "result"))
                except (ValueError, CacheError) as error:
                    raise InputError(
                        f"a result in the shared study cannot be read: {error}",
                        "all workers run one version of flexattn",
                        "remove the study, or use another database",
                    ) from error
        # A twin has no times: it is understood once the one that was timed for it is known.
        self._twins.sort(key=lambda entries: not entries[-1].trial.screening)
        for entries in self._twins:
            self.evaluator.restore(entries)
        self._twins.clear()

    def _race(self) -> Record | None:
        """The record: another's, or of a race on this GPU; None while another worker's runs."""
        if told := self._finals.results().get(0):
            return decode_record(told.encode())
        states = self._finals.known()
        if states.get(0) == "RUNNING":
            return None
        held = self._finals.propose()
        if held is None:
            return None
        try:
            self._learn()
            trials, decision, untried = self.evaluator.finals()
            seconds = time.monotonic() - self.evaluator.begin
            record = record_of(self.subject, self._method, trials, decision, untried, seconds)
            self._finals.note(FINISHED, time.time())
            kept = self._finals.tell(held, 0.0, encode_record(record))
        except BaseException:
            self._finals.give_back([held])
            raise
        return record if kept else None
