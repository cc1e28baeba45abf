"""SharedTuning: one problem tuned by any number of workers on any hosts, through a database."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
import uuid
from collections.abc import Sequence, Set as AbstractSet
from typing import Any

from flexattn.errors import CacheError, InputError
from flexattn.records.codec import decode, decode_record, encode, encode_record
from flexattn.records.record import Record, slug
from flexattn.tune.evaluator import Evaluator
from flexattn.tune.journal import Entry
from flexattn.tune.method import FOR_SCREENING, Method
from flexattn.tune.search import SHARE, Axes, quiet_optuna, sampler_of
from flexattn.tune.shared_study import Claim, Heartbeat, SharedStudy, connect
from flexattn.tune.subject import Subject

# Points that one worker holds at once: as many as a race beside the default makes good use of.
HELD = 4
_POLL_S = 0.3
# Proposals that may be taken or cannot be, before any free point is taken instead.
PROPOSALS = 4
HEARTBEAT = Heartbeat()
# Words that workers leave with a study: the budget is used up; when its record was made.
ENDED, FINISHED = "ended", "finished"


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


class SharedTuning:
    """One worker's part: what the others found goes into its own table.

    Workers measure different points, and one of them races the finalists on its GPU. A budget that
    one worker has used up ends the search for all. first: points to measure first.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        url: str,
        heartbeat: Heartbeat = HEARTBEAT,
        first: Sequence[int] = (),
        again_since: float | None = None,
    ) -> None:
        self.subject = subject = evaluator.subject
        self.evaluator, self._first = evaluator, first
        self._method = method = evaluator.method
        self._every = len(subject.configs)
        self._whole = self._every <= method.all_up_to
        asked = method.limit or max(1, int(SHARE * self._every))
        self._limit = self._every if self._whole else min(self._every, asked)
        # Workers that draw alike would propose alike.
        self._draw = random.Random(uuid.uuid4().int)
        storage = connect(url, heartbeat)
        sampler = sampler_of(method.sampler, self._draw.randrange(2**31))
        name = study_name(subject, method)
        known, number = set(quiet_optuna().get_all_study_names(storage)), 1
        while f"{name} round {number + 1}" in known:
            number += 1
        newest = f"{name} round {number}" if number > 1 else name
        self._finals = self._race_of(storage, newest)
        finished = self._finals.results() and (self._finals.noted(FINISHED) or 0.0)
        if again_since is not None and finished and finished < again_since:
            newest = f"{name} round {number + 1}"
            self._finals = self._race_of(storage, newest)
        self._study = SharedStudy(storage, newest, Axes(subject.configs), sampler)
        self._seen: set[int] = set()

    def _race_of(self, storage: Any, name: str) -> SharedStudy:
        """The study of one point that whoever races the finalists owns."""
        return SharedStudy(storage, f"{name} finals", Axes(self.subject.configs[:1]))

    def run(self, held: int = HELD) -> Record:
        """Measure what is left, with the others; then race the finalists, or wait for who does."""
        self.evaluator.progress.stage("measure", self._limit)
        with self._study, self._finals:
            while True:
                batch, busy = self._ask(held)
                if batch:
                    self._measure(batch)
                    continue
                if not busy and (record := self._race()) is not None:
                    return record
                time.sleep(_POLL_S * (0.5 + self._draw.random()))

    def _ask(self, count: int) -> tuple[list[Claim], bool]:
        """Points to measure; without any, whether others still measure some."""
        states = self._study.known()
        free = [point for point, state in states.items() if state == "FAIL"]
        if self.evaluator.left(FOR_SCREENING) <= 0 and self._study.noted(ENDED) is None:
            self.evaluator.progress.note("the time budget ended the search")
            self._study.note(ENDED, True)
        ended = "COMPLETE" in states.values() and self._study.noted(ENDED) is not None
        room = 0 if ended else max(0, self._limit - len(states))
        batch: list[Claim] = []
        for _ in range(min(count, len(free) + room)):
            point = free.pop() if free else self._new(states.keys() | {h.point for h in batch})
            if point is not None and (held := self._study.take(point)):
                batch.append(held)
        return batch, bool(room or "RUNNING" in states.values() or "FAIL" in states.values())

    def _new(self, taken: AbstractSet[int]) -> int | None:
        """A point that nobody took: a seed, or the sampler's proposal, or any."""
        free = [point for point in range(self._every) if point not in taken]
        if seeds := [point for point in self._first if point in free]:
            return seeds[0]
        for _ in range(0 if self._whole else PROPOSALS):
            if (point := self._study.propose()) in free:
                return point
        # Workers that take the same point lose a trial each: they begin at places of their own.
        return self._draw.choice(free) if free else None

    def _measure(self, batch: Sequence[Claim]) -> None:
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

    def _tell(self, held: Claim, default: Entry, own: Entry | None) -> None:
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
        fresh: list[tuple[Entry, ...]] = []
        for point, text in self._study.results().items():
            if point not in self._seen:
                self._seen.add(point)
                try:
                    fresh.append(decode(tuple[Entry, ...], json.loads(text), "result"))
                except (ValueError, CacheError) as error:
                    raise InputError(
                        f"a result in the shared study cannot be read: {error}",
                        "all workers run one version of flexattn",
                        "remove the study, or use another database",
                    ) from error
        # A twin has no times: it is understood once the one that was timed for it is known.
        for entries in sorted(fresh, key=lambda entries: not entries[-1].trial.screening):
            self.evaluator.restore(entries)

    def _race(self) -> Record | None:
        """The record: another's, or of a race on this GPU; None while another worker's runs."""
        if told := self._finals.results().get(0):
            return decode_record(told.encode())
        states = self._finals.known()
        if states.get(0) == "RUNNING":
            return None
        held = self._finals.take(0)
        if held is None:
            return None
        try:
            self._learn()
            record = self.evaluator.record()
            self._finals.note(FINISHED, time.time())
            kept = self._finals.tell(held, 0.0, encode_record(record))
        except BaseException:
            self._finals.give_back([held])
            raise
        return record if kept else None
