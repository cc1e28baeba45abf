"""SharedTuning: one problem tuned by any number of workers on any hosts, through a database.

A SharedStudy is an Optuna study whose points the workers share. A worker takes a point by a trial,
and beats for it until it has told the result. The first trial of a point that has not failed owns
it. A trial without beats is failed by Optuna, and its point is free again.
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
from collections.abc import Callable, Sequence, Set as AbstractSet
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

# What a worker leaves with a trial: its result, as text.
RESULT = "result"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Seconds between beats, and after how many without one a trial counts as dead."""

    beat_s: int = 10
    grace_s: int = 60


@dataclass(frozen=True, slots=True)
class Claim:
    """A point that this worker owns, with Optuna's trial for it."""

    point: int
    trial: Any
    trial_id: int


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
    def known(self) -> dict[int, str]:
        """The state of each point that was taken: COMPLETE, RUNNING, or FAIL for a free one."""
        import optuna

        optuna.storages.fail_stale_trials(self._study)
        owners = self._owners()
        for each in owners.values():
            # Optuna takes a trial that never beat for alive: its process may have died before.
            if each.state.name == "RUNNING" and each.number not in self._noticed:
                self._noticed.add(each.number)
                self._storage.record_heartbeat(
                    self._storage.get_trial_id_from_study_id_trial_number(self._id, each.number)
                )
        return {point: each.state.name for point, each in owners.items()}

    @_patient
    def results(self) -> dict[int, str]:
        """The result of each point that is complete."""
        done = {p: each for p, each in self._owners().items() if each.state.name == "COMPLETE"}
        return {point: each.user_attrs[RESULT] for point, each in done.items()}

    def _owners(self) -> dict[int, Any]:
        """The trial that owns each point; of a point that nobody owns one that failed."""
        owners: dict[int, Any] = {}
        for trial in self._study.get_trials(deepcopy=False):
            # One that the sampler is about to propose has some of its parameters.
            if trial.params.keys() != self._distributions.keys():
                continue
            point = self._axes.find(trial.params)[1]
            if point is not None and (point not in owners or owners[point].state.name == "FAIL"):
                owners[point] = trial
        return owners

    @_patient
    def take(self, point: int) -> Claim | None:
        """Own this point; None if somebody else does."""
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
        held = Claim(point, optuna.trial.Trial(self._study, trial_id), trial_id)
        if self._owners()[point].number != held.trial.number:
            self._fail(held.trial)
            return None
        self._held[trial_id] = None
        return held

    @_patient
    def propose(self) -> int | None:
        """The point that the sampler proposes; None where it cannot be."""
        trial = self._study.ask(self._distributions)
        point = self._axes.find(trial.params)[1]
        if point is None:
            tell_cost(self._study, trial, float("inf"), feasible=False)
        else:
            self._fail(trial)  # who takes it has a trial of its own
        return point

    @_patient
    def tell(self, held: Claim, cost: float, result: str) -> bool:
        """Leave a result; False where the point was taken over meanwhile, and this is void."""
        import optuna

        self._held.pop(held.trial_id, None)
        try:
            held.trial.set_user_attr(RESULT, result)
            tell_cost(self._study, held.trial, cost)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True

    def give_back(self, held: Sequence[Claim]) -> None:
        """Let others have points that were not measured, at once."""
        for each in held:
            self._held.pop(each.trial_id, None)
            self._fail(each.trial)

    @_patient
    def _fail(self, trial: Any) -> None:
        import optuna

        # It may have been taken for dead before.
        with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    @_patient
    def note(self, name: str, value: Any) -> None:
        """Leave a word for all workers of the study."""
        self._study.set_user_attr(name, value)

    @_patient
    def noted(self, name: str) -> Any:
        """A word that some worker left, or None."""
        return self._study.user_attrs.get(name)


# Points that one worker holds at once: as many as a race beside the default makes good use of.
HELD = 4
_POLL_S = 0.3
# Proposals that may be taken or cannot be, before any free point is taken instead.
PROPOSALS = 4
HEARTBEAT = Heartbeat()
# What a worker leaves with a study when its budget is used up.
ENDED = "ended"


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

    Workers measure different points, and one of them races the finalists on its GPU. A budget that
    one worker has used up ends the search for all. first: points to measure first.
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
        self._method = method = evaluator.method
        self._every = len(subject.configs)
        self._whole = self._every <= method.all_up_to
        asked = method.limit or max(1, int(SHARE * self._every))
        self._limit = self._every if self._whole else min(self._every, asked)
        # Workers that draw alike would propose alike.
        self._draw = random.Random(uuid.uuid4().int)
        storage = connect(url, heartbeat)
        sampler = sampler_of(self._draw.randrange(2**31))
        name = study_name(subject, method)
        self._study = SharedStudy(storage, name, Axes(subject.configs), sampler)
        # Of one point, which whoever races the finalists owns.
        self._finals = SharedStudy(storage, f"{name} finals", Axes(subject.configs[:1]))
        self._seen: set[int] = set()

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
            kept = self._finals.tell(held, 0.0, encode_record(record))
        except BaseException:
            self._finals.give_back([held])
            raise
        return record if kept else None
