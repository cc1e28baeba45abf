"""search: which configs to measure next, all of them or those that Optuna asks for."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from flexattn.kernels.base.config import Config

# Spaces up to this size are measured whole.
ALL_UP_TO = 200
# Of a larger space Optuna asks for this part.
SHARE = 0.2
# What a point without a time is told to cost, in times of the default: large, and finite.
WORST = 10.0
# Proposals that may be infeasible or known before the nearest new config is taken instead.
TRIES = 16
# Proposals at random before the sampler has something to learn from.
STARTED = 10
# After this part of the search come the neighbours of the best: on studies of an H200 this took
# the mean regret from 3.1 to 2.2 % where TPE alone was worst, and cost nothing elsewhere.
SAMPLED, LEADERS = 0.5, 3


class Everything:
    """All configs: the seeds first, then in their order.

    total: how many it will ask for at most. batch: how many to ask for at once, so that it learns
    soon enough. Costs are times of the default.
    """

    def __init__(self, size: int, seeds: Sequence[int] = ()) -> None:
        self._left = dict.fromkeys([*seeds, *range(size)])
        self.total = self.batch = size

    def ask(self, count: int) -> list[int]:
        """Up to `count` indices that were never asked for; empty at the end."""
        taken = list(islice(self._left, count))
        for index in taken:
            del self._left[index]
        return taken

    def tell(self, index: int, cost: float) -> None:
        """Takes the cost of an index, infinite where it failed; nothing changes, as all are
        measured.
        """


class Axes:
    """The feasible configs as points on categorical axes, one for each field that varies."""

    def __init__(self, configs: Sequence[Config]) -> None:
        rows = [{"template": type(each).__name__, **asdict(each)} for each in configs]
        names = dict.fromkeys(name for row in rows for name in row)
        values = {
            name: sorted({row.get(name, "none") for row in rows}, key=lambda v: (str(type(v)), v))
            for name in names
        }
        self.choices = {name: found for name, found in values.items() if len(found) > 1}
        self.points = [
            tuple(found.index(row.get(name, "none")) for name, found in self.choices.items())
            for row in rows
        ]
        self._index = {point: index for index, point in enumerate(self.points)}

    def params(self, index: int) -> dict[str, Any]:
        """A config's value on each axis."""
        pairs = zip(self.choices.items(), self.points[index], strict=True)
        return {name: values[at] for (name, values), at in pairs}

    def find(self, params: dict[str, Any]) -> tuple[tuple[int, ...], int | None]:
        """The point of these values, and the config there, None where none is feasible."""
        point = tuple(values.index(params[name]) for name, values in self.choices.items())
        return point, self._index.get(point)

    def beside(self, index: int, among: Iterable[int]) -> list[int]:
        """The configs that differ from this one on a single axis."""
        here = self.points[index]
        return [
            i for i in among
            if sum(a != b for a, b in zip(self.points[i], here, strict=True)) == 1
        ]  # fmt: skip

    def nearest(self, point: tuple[int, ...], among: Sequence[int]) -> int:
        """The config that differs from a point in the fewest axes, then by the fewest steps."""

        def steps(index: int) -> tuple[int, int]:
            moves = [abs(a - b) for a, b in zip(self.points[index], point, strict=True)]
            return sum(map(bool, moves)), sum(moves)

        return min(among, key=lambda index: (steps(index), index))


def quiet_optuna() -> Any:
    """Optuna, which says neither what it does nor that some of it is experimental."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def distributions(axes: Axes) -> dict[str, Any]:
    """The axes as Optuna's distributions."""
    categorical = quiet_optuna().distributions.CategoricalDistribution
    return {name: categorical(values) for name, values in axes.choices.items()}


def sampler_of(seed: int) -> Any:
    """Optuna's sampler, said aloud where its defaults matter."""
    return quiet_optuna().samplers.TPESampler(
        seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTED
    )


def tell_cost(study: Any, trial: Any, cost: float, *, feasible: bool = True) -> None:
    """Tell Optuna a cost; what has none is infeasible by its own constraint, and dear."""
    fine = feasible and math.isfinite(cost)
    trial.set_constraint("runs", 0.0 if fine else 1.0)
    # The logarithm, so that halving a good time counts as much as halving a bad one.
    study.tell(trial, math.log(min(max(cost, 1e-6), WORST)) if fine else math.log(WORST))


class Guided:
    """Optuna through ask and tell, from the seeds on, then the neighbours of the best.

    It is asked as Everything is. No point is asked for twice.
    """

    batch = 5

    def __init__(
        self,
        configs: Sequence[Config],
        seeds: Sequence[int] = (),
        *,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self._axes = Axes(configs)
        self._distributions = distributions(self._axes)
        self._unseen = dict.fromkeys(range(len(configs)))
        self._running: dict[int, Any] = {}
        self.total = min(len(configs), limit or max(1, int(SHARE * len(configs))))
        self._study = quiet_optuna().create_study(sampler=sampler_of(seed))
        self._seeds = list(dict.fromkeys(seeds))
        self._costs: dict[int, float] = {}
        self._random = random.Random(seed)

    def ask(self, count: int) -> list[int]:
        """The next ones by the sampler, which knows those that still run."""
        asked = len(self._axes.points) - len(self._unseen)
        return [self._next() for _ in range(min(count, self.total - asked))]

    def tell(self, index: int, cost: float) -> None:
        """Takes the cost of an index, infinite where it failed."""
        self._costs[index] = cost
        trial = self._running.pop(index, None)
        if trial is not None:
            tell_cost(self._study, trial, cost)

    def _next(self) -> int:
        import optuna

        while self._seeds:
            index = self._seeds.pop(0)
            if index in self._unseen:
                return self._start(index)
        if len(self._axes.points) - len(self._unseen) >= SAMPLED * self.total:
            for leader in sorted(self._costs, key=lambda i: (self._costs[i], i))[:LEADERS]:
                if beside := self._axes.beside(leader, self._unseen):
                    return self._start(self._random.choice(beside))
        point: tuple[int, ...] = ()
        for _ in range(TRIES):
            trial = self._study.ask(self._distributions)
            point, found = self._axes.find(trial.params)
            if found is None:
                tell_cost(self._study, trial, math.inf, feasible=False)
            elif found in self._unseen:
                del self._unseen[found]
                self._running[found] = trial
                return found
            else:
                # Told again it would count twice; a failed trial teaches nothing.
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._start(self._axes.nearest(point, list(self._unseen)))

    def _start(self, index: int) -> int:
        """A trial at exactly this config: the queue holds nothing else."""
        del self._unseen[index]
        self._study.enqueue_trial(self._axes.params(index))
        self._running[index] = self._study.ask(self._distributions)
        return index
