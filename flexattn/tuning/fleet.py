"""SharedTuning: one problem tuned by any number of workers on any hosts, through a database.

The workers share an Optuna study. One of them takes a point by a trial, and beats for it until it
has told the result. The first trial of a point that has not failed owns it. Optuna fails a trial
without beats, and its point is free again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from flexattn.errors import CacheError, InputError, UnsupportedError
from flexattn.records.codec import decode, decode_record, encode, encode_record
from flexattn.records.record import Record, slug
from flexattn.settings import log
from flexattn.tuning.evaluator import FOR_SCREENING, Entry, Evaluator, Method, Subject
from flexattn.tuning.search import SHARE, Axes, distributions, quiet_optuna, sampler_of, tell_cost
from flexattn.util.locks import renewed

_F = TypeVar("_F", bound=Callable[..., Any])

# What a worker leaves with a trial, and who raced the finalists with the study, as text.
RESULT, RECORD = "result", "record"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Seconds between beats, and after how many without one a trial counts as dead."""

    beat_s: int = 10
    grace_s: int = 60


def _patient(method: _F, tries: int = 8) -> _F:
    """The method, called again where a database was busy, for a few seconds."""

    @functools.wraps(method)
    def patient(*args: Any) -> Any:
        import optuna
        import sqlalchemy

        busy = optuna.exceptions.StorageInternalError, sqlalchemy.exc.DatabaseError
        for attempt in range(tries - 1):
            try:
                return method(*args)
            except busy as error:
                log.debug("storage busy: %s", str(error).splitlines()[0])
                time.sleep(0.05 * 2**attempt)
        return method(*args)

    return patient  # type: ignore[return-value]


def connect(url: str, heartbeat: Heartbeat) -> Any:
    """Optuna's storage behind a URL, with heartbeats; makes the tables where there are none.

    Raises InputError for a URL that is no database's, UnsupportedError without its driver.
    """
    import sqlalchemy

    optuna = quiet_optuna()
    # Optuna beats for `optimize` alone and says so at every ask; here the worker beats itself.
    warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith(("postgresql://", "postgres://")):
        # Without a driver's name SQLAlchemy asks for psycopg2, which is not psycopg.
        url = "postgresql+psycopg://" + url.split("://", 1)[1]
    elif url.startswith("sqlite:"):
        # Writers wait for one another.
        options = {"connect_args": {"timeout": 60}}

    def storage() -> Any:
        return optuna.storages.RDBStorage(
            url, options, heartbeat_interval=heartbeat.beat_s, grace_period=heartbeat.grace_s
        )

    try:
        # Workers that start together make the tables at once, and all but one find them made.
        made = _patient(storage, 5)()
    except ImportError as error:
        raise UnsupportedError(
            f"--storage {url.split('://')[0]}://…: {error}",
            "a database needs its driver",
            "for PostgreSQL, pip install 'flexattn[postgres]'",
        ) from error
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError) as error:
        raise InputError(
            f"--storage …{url.split('@')[-1]}: {error}",
            "it is postgresql://user@host/database or sqlite:///file",
        ) from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise InputError(
            f"--storage {url.split('@')[-1]}: {str(error).splitlines()[0]}",
            "the database can be reached and written",
        ) from error
    if url.startswith("sqlite:"):
        _let_readers_write(made.engine)
    return made


def _let_readers_write(engine: Any) -> None:
    """SQLite's write-ahead log: readers hold up no writer, so hearts beat while others look."""
    import sqlalchemy

    def relax(connection: Any, record: object) -> None:
        # What a lost machine takes with it is measured again.
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(engine, "connect", relax)
    engine.dispose()
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")


class SharedStudy:
    """One study, whose points are the configs on some axes; each is measured by one worker.

    In a `with` block a thread beats for the trials that this worker holds.
    """

    def __init__(self, storage: Any, name: str, axes: Axes, sampler: Any = None) -> None:
        self._storage, self._axes = storage, axes
        self._distributions = distributions(axes)
        self._study = self._made(name, sampler)
        self._id = storage.get_study_id_from_name(name)
        self._held: dict[int, None] = {}
        self._noticed: set[int] = set()
        self._stop = renewed(threading.Event())
        self._thread = threading.Thread(target=self._beat, daemon=True)

    @_patient
    def _made(self, name: str, sampler: Any) -> Any:
        import optuna

        return optuna.create_study(
            storage=self._storage, study_name=name, sampler=sampler, load_if_exists=True
        )

    def __enter__(self) -> SharedStudy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._storage.get_heartbeat_interval()):
            for trial_id in list(self._held):
                try:
                    self._storage.record_heartbeat(trial_id)
                except Exception as error:  # the next beat may get through
                    log.warning("no heartbeat: %s", str(error).splitlines()[0])

    @_patient
    def owners(self) -> dict[int, Any]:
        """The trial that owns each point that was taken; of a free point one that failed."""
        import optuna

        optuna.storages.fail_stale_trials(self._study)
        found: dict[int, Any] = {}
        for trial in self._study.get_trials(deepcopy=False):
            # One that the sampler is about to propose has some of its parameters.
            if trial.params.keys() == self._distributions.keys():
                point = self._axes.find(trial.params)[1]
                if point is not None and (point not in found or found[point].state.name == "FAIL"):
                    found[point] = trial
        for each in found.values():
            # Optuna takes a trial that never beat for alive: its process may have died before.
            if each.state.name == "RUNNING" and each.number not in self._noticed:
                self._noticed.add(each.number)
                self._storage.record_heartbeat(each._trial_id)
        return found

    @_patient
    def take(self, point: int) -> Any:
        """A trial that owns this point; None if somebody else does."""
        import optuna

        # Whole at once, so that the first trial of a point is the first for everybody. Optuna's
        # own queue gives one trial to two workers on SQLite.
        fresh = optuna.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=self._axes.params(point),
            distributions=self._distributions,
        )
        trial_id = self._storage.create_new_trial(self._id, fresh)
        self._storage.record_heartbeat(trial_id)
        trial = optuna.trial.Trial(self._study, trial_id)
        if self.owners()[point].number != trial.number:
            self.give_back([trial])
            return None
        self._held[trial_id] = None
        return trial

    @_patient
    def propose(self) -> int | None:
        """The point that the sampler proposes; None where it cannot be."""
        trial = self._study.ask(self._distributions)
        point = self._axes.find(trial.params)[1]
        if point is None:
            tell_cost(self._study, trial, float("inf"), feasible=False)
        else:
            self.give_back([trial])  # who takes it has a trial of its own
        return point

    @_patient
    def tell(self, trial: Any, cost: float, result: str) -> bool:
        """Leave a result; False where the point was taken over meanwhile, and this is void."""
        import optuna

        self._held.pop(trial._trial_id, None)
        try:
            trial.set_user_attr(RESULT, result)
            tell_cost(self._study, trial, cost)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True

    @_patient
    def give_back(self, trials: Iterable[Any]) -> None:
        """Let others have points that were not measured, at once."""
        import optuna

        for each in trials:
            self._held.pop(each._trial_id, None)
            # It may have been taken for dead before.
            with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                self._study.tell(each, state=optuna.trial.TrialState.FAIL)

    @_patient
    def kept(self, record: str | None = None) -> str | None:
        """The record that a worker left; one that is given is left if there is none."""
        if RECORD not in self._study.user_attrs and record is not None:
            self._study.set_user_attr(RECORD, record)
        found: str | None = self._study.user_attrs.get(RECORD)
        return found


# Points that one worker holds at once: as many as a race beside the default makes good use of.
HELD = 4
_POLL_S = 0.3
# Proposals that may be taken or cannot be, before any free point is taken instead.
PROPOSALS = 4
HEARTBEAT = Heartbeat()


def study_name(subject: Subject, method: Method) -> str:
    """The facts that workers of one study share: device, key, environment, policy and space.

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

    Workers measure different points. When none is left, each races the finalists on its GPU unless
    one has left its record. A worker whose budget is used up takes no more points. first: points
    to measure first.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        url: str,
        heartbeat: Heartbeat = HEARTBEAT,
        first: Sequence[int] = (),
    ) -> None:
        self.subject = subject = evaluator.subject
        self.evaluator, self._first = evaluator, first
        method, self._every = evaluator.method, len(subject.configs)
        self._whole = self._every <= method.all_up_to
        asked = method.limit or max(1, int(SHARE * self._every))
        self._limit = self._every if self._whole else min(self._every, asked)
        # Workers that draw alike would propose alike.
        self._draw = random.Random(uuid.uuid4().int)
        sampler, name = sampler_of(self._draw.randrange(2**31)), study_name(subject, method)
        self._study = SharedStudy(connect(url, heartbeat), name, Axes(subject.configs), sampler)
        self._seen: set[int] = set()

    def run(self, held: int = HELD) -> Record:
        """Measure what is left, with the others; then race the finalists."""
        self.evaluator.progress.stage("measure", self._limit)
        with self._study:
            while (batch := self._ask(held)) is not None:
                if batch:
                    self._measure(batch)
                else:
                    time.sleep(_POLL_S * (0.5 + self._draw.random()))
            told = self._study.kept()
            if told is None:
                self._learn()
                told = self._study.kept(encode_record(self.evaluator.record()))
        assert told is not None
        return decode_record(told.encode())

    def _ask(self, count: int) -> dict[int, Any] | None:
        """Points to measure, each with its trial; none while others measure; None at the end."""
        states = {point: each.state.name for point, each in self._study.owners().items()}
        free = [point for point, state in states.items() if state == "FAIL"]
        room = max(0, self._limit - len(states))
        if self.evaluator.left(FOR_SCREENING) <= 0 and "COMPLETE" in states.values():
            if free or room:
                self.evaluator.progress.note("the time budget ended the search")
            free, room = [], 0
        if not (free or room or "RUNNING" in states.values()):
            return None
        batch: dict[int, Any] = {}
        for _ in range(min(count, len(free) + room)):
            point = free.pop() if free else self._new({*states, *batch})
            if point is not None and (trial := self._study.take(point)):
                batch[point] = trial
        return batch

    def _new(self, taken: Collection[int]) -> int | None:
        """A point that nobody took: a seed, or the sampler's proposal, or any."""
        free = [point for point in range(self._every) if point not in taken]
        if seeds := [point for point in self._first if point in free]:
            return seeds[0]
        for _ in range(0 if self._whole else PROPOSALS):
            if (point := self._study.propose()) in free:
                return point
        # Workers that take the same point lose a trial each: they begin at places of their own.
        return self._draw.choice(free) if free else None

    def _measure(self, batch: dict[int, Any]) -> None:
        """Screen the points that this worker owns; tell each with the default's own times."""
        try:
            self._learn()
            default, *entries = self.evaluator.screen(list(batch))
            by_config = {entry.trial.config: entry for entry in entries}
            for point, trial in batch.items():
                own = by_config.get(self.subject.configs[point])
                self._tell(point, trial, [default] if own is None else [default, own])
        except BaseException:
            # Ctrl-C too: others need not wait for this heart to stop.
            self._study.give_back(batch.values())
            raise

    def _tell(self, point: int, trial: Any, entries: Sequence[Entry]) -> None:
        cost = self.evaluator.table.cost(point)
        text = json.dumps([encode(entry) for entry in entries])
        if self._study.tell(trial, cost if math.isfinite(cost) else math.inf, text):
            self._seen.add(point)
        else:
            self.evaluator.progress.note(
                "a point was taken over by another worker; its time is void"
            )

    def _learn(self) -> None:
        """Take the others' results into this worker's table: what is known is not timed again."""
        fresh: list[tuple[Entry, ...]] = []
        for point, trial in self._study.owners().items():
            if point not in self._seen and trial.state.name == "COMPLETE":
                self._seen.add(point)
                try:
                    text = json.loads(trial.user_attrs[RESULT])
                    fresh.append(decode(tuple[Entry, ...], text, "result"))
                except (ValueError, CacheError) as error:
                    raise InputError(
                        f"a result in the shared study cannot be read: {error}",
                        "all workers run one version of flexattn",
                        "remove the study, or use another database",
                    ) from error
        # A twin has no times: it is understood once the one that was timed for it is known.
        for entries in sorted(fresh, key=lambda entries: not entries[-1].trial.screening):
            self.evaluator.restore(entries)
