"""SharedStudy: an Optuna study in a database, whose points workers of any number of hosts share.

A worker takes a point by a trial, and beats for it until it has told the result. The first trial
of a point that has not failed owns it. A trial whose heart stands still is failed by Optuna, and
its point is free again.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from flexattn.errors import InputError, UnsupportedError
from flexattn.settings import log
from flexattn.tune.search import Axes, distributions, quiet_optuna, tell_cost
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
        """What was told of each point that is complete."""
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
