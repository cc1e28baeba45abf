"""SharedStudy: one study in a database, whose points any number of workers on any hosts share.

A worker asks for a point, owns it by a claim, and beats for it until it has told the result. A
trial whose heart stands still is failed, and its point is owned by the next worker that asks.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flexattn.errors import InputError, UnsupportedError
from flexattn.settings import log
from flexattn.tune.search import tell_cost
from flexattn.tune.study_locks import StudyLocks
from flexattn.util.locks import renewed

_T = TypeVar("_T")

# What a worker leaves with a trial: its result, as text.
RESULT = "result"


@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds between beats, and after how many without one a trial counts as dead."""

    beat_s: int = 10
    grace_s: int = 60


@dataclass(frozen=True, slots=True)
class Held:
    """A point that this worker owns, with Optuna's trial for it."""

    point: int
    trial: Any
    trial_id: int


def connect(url: str, pulse: Pulse) -> Any:
    """Optuna's storage behind a URL, with heartbeats; makes the tables where there are none.

    Raises InputError for a URL that is no database's, UnsupportedError without its driver.
    """
    import optuna
    import sqlalchemy

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Optuna beats for `optimize` alone and says so at every ask; here the worker beats itself.
    warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")
    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith(("postgresql://", "postgres://")):
        # Without a driver's name SQLAlchemy asks for psycopg2, which is not psycopg.
        url = "postgresql+psycopg://" + url.split("://", 1)[1]
    elif url.startswith("sqlite:"):
        # Writers wait for one another.
        options = {"connect_args": {"timeout": 60}}

    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = optuna.storages.RDBStorage(
                url, options, heartbeat_interval=pulse.beat_s, grace_period=pulse.grace_s
            )
        if url.startswith("sqlite:"):
            _let_readers_write(storage.engine)
        return storage

    try:
        # Workers that start together make the tables at once, and all but one find them made.
        return patient(made, 5, sqlalchemy.exc.DatabaseError)
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


def rounds(storage: Any, name: str) -> int:
    """How many rounds of a study there are: 0 before the first, which has the plain name."""
    import optuna

    names: list[str] = patient(lambda: optuna.get_all_study_names(storage))
    numbers = [1 for each in names if each == name]
    numbers += [
        int(tail) for each in names if (tail := each.removeprefix(f"{name} round ")).isdigit()
    ]
    return max(numbers, default=0)


class Heart:
    """Beats in a thread for the trials that this worker holds: ask and tell do not.

    Optuna itself beats inside `optimize` alone.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._held: dict[int, None] = {}
        self._stop = renewed(threading.Event())
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, trial_id: int) -> None:
        """Beat for a trial, now and until it is released."""
        patient(lambda: self._storage.record_heartbeat(trial_id))
        self._held[trial_id] = None

    def release(self, trial_id: int) -> None:
        """Beat for it no more."""
        self._held.pop(trial_id, None)

    def _beat(self) -> None:
        while not self._stop.wait(self._storage.get_heartbeat_interval()):
            for trial_id in list(self._held):
                try:
                    self._storage.record_heartbeat(trial_id)
                except Exception as error:  # the next beat may get through
                    log.warning("no heartbeat: %s", str(error).splitlines()[0])


class SharedStudy:
    """One study: points are numbers, and each is measured by one worker at a time.

    params: of a point, as Optuna sees it. find: the point of params, None for one that cannot be.
    """

    def __init__(
        self,
        storage: Any,
        heart: Heart,
        name: str,
        params: Callable[[int], dict[str, Any]],
        find: Callable[[dict[str, Any]], int | None],
        distributions: dict[str, Any],
        sampler: Any = None,
    ) -> None:
        import optuna

        self.name = name
        self._params, self._find, self._distributions = params, find, distributions
        self._storage, self._heart = storage, heart
        self._study = patient(
            lambda: optuna.create_study(
                storage=storage, study_name=name, sampler=sampler, load_if_exists=True
            )
        )
        self._id = storage.get_study_id_from_name(name)
        self._locks = StudyLocks(storage.engine, name)

    def known(self) -> dict[int, str]:
        """The state of each point that has an owner: COMPLETE, RUNNING, or FAIL for a dead one.

        Trials whose heart stands still are failed first.
        """
        self._bury()
        # Owners first: a trial is made before its claim, so every owner is among the trials.
        owners = patient(self._locks.owners)
        states = {t.number: t.state.name for t in self._trials()}
        return {point: states[number] for point, number in owners.items()}

    def results(self) -> dict[int, str]:
        """What was told of each point that is complete."""
        owners = patient(self._locks.owners)
        told = {t.number: t.user_attrs for t in self._trials() if t.state.name == "COMPLETE"}
        return {p: told[n][RESULT] for p, n in owners.items() if n in told}

    def take(self, point: int) -> Held | None:
        """Own this point; None if somebody else does."""
        import optuna

        # Not through Optuna's queue, from which two workers on SQLite may pop one trial.
        fresh = optuna.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=self._params(point),
            distributions=self._distributions,
        )
        trial_id = patient(lambda: self._storage.create_new_trial(self._id, fresh))
        return self._own(optuna.trial.Trial(self._study, trial_id), trial_id)

    def propose(self) -> Held | None:
        """Own the point that the sampler proposes; None where it cannot be, or was taken."""
        trial = patient(lambda: self._study.ask(self._distributions))
        number = trial.number
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        return self._own(trial, trial_id)

    def _own(self, trial: Any, trial_id: int) -> Held | None:
        # The heart beats before the claim is made: an owner that dies is always found dead.
        self._heart.hold(trial_id)
        point = self._find(trial.params)
        held = Held(-1 if point is None else point, trial, trial_id)
        if point is None:
            self._heart.release(trial_id)
            patient(lambda: tell_cost(self._study, trial, float("inf"), feasible=False))
            return None
        if patient(lambda: self._locks.claim(point, trial.number)):
            return held
        owner = patient(self._locks.owners).get(point, -1)
        if owner == trial.number:
            return held  # the claim was made, and only its answer was lost
        states = {t.number: t.state.name for t in self._trials()}
        if states.get(owner) == "FAIL" and patient(
            lambda: self._locks.take_over(point, owner, trial.number)
        ):
            return held
        self._drop(held)
        return None

    def tell(self, held: Held, cost: float, result: str) -> bool:
        """Leave a result; False where the point was taken over meanwhile, and this is void."""
        import optuna

        self._heart.release(held.trial_id)
        try:
            patient(lambda: held.trial.set_user_attr(RESULT, result))
            patient(lambda: tell_cost(self._study, held.trial, cost))
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return False
        return True

    def give_back(self, held: Sequence[Held]) -> None:
        """Let others have points that were not measured, at once."""
        for each in held:
            self._drop(each)

    def note(self, name: str, value: Any) -> None:
        """Leave a word for all workers of the study."""
        patient(lambda: self._study.set_user_attr(name, value))

    def noted(self, name: str) -> Any:
        """A word that some worker left, or None."""
        return patient(lambda: self._study.user_attrs).get(name)

    def _trials(self) -> list[Any]:
        found: list[Any] = patient(lambda: self._study.get_trials(deepcopy=False))
        return found

    def _drop(self, held: Held) -> None:
        import optuna

        self._heart.release(held.trial_id)
        state = optuna.trial.TrialState.FAIL
        try:
            patient(lambda: self._study.tell(held.trial, state=state))
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            return

    def _bury(self) -> None:
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            patient(lambda: optuna.storages.fail_stale_trials(self._study))


def patient(
    action: Callable[[], _T], tries: int = 8, besides: type[Exception] = TimeoutError
) -> _T:
    """Do it again where a database was busy, for a few seconds; the last error goes through."""
    import optuna
    import sqlalchemy

    busy = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError, besides)
    for attempt in range(tries - 1):
        try:
            return action()
        except busy as error:
            log.debug("storage busy: %s", str(error).splitlines()[0])
            time.sleep(0.05 * 2**attempt)
    return action()
