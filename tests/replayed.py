"""The Measurer of a study: times drawn from its samples, in place of a device."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bench.studies import Study
from flexattn.kernels.base.config import Config
from flexattn.measure.task import Task
from flexattn.records.record import Failed, Gated, Trial
from flexattn.tuning.builds import BuiltConfig

# What a study does not know of a config that was never gated.
_UNJUDGED = Gated("not judged in the study", 0.0, 0.0, 0.0, True)


class ReplayMeasurer:
    """Times drawn from a study: each round draws one of its rounds, the same for all configs.

    A stored batch is brought to the first one's level by the default, which ran in each. A seed
    gives the same times again.
    """

    def __init__(self, study: Study, seed: int = 0) -> None:
        self._trials = {trial.config: trial for trial in study.trials}
        self._place = {trial.config: index for index, trial in enumerate(study.trials)}
        self._study = study
        self._random = random.Random(seed)
        self._rounds = min(
            (len(t.screening) for t in study.trials if len(t.screening) > 1), default=1
        )
        self.gated: list[Config] = []
        self.measured: list[Config] = []

    def start(self) -> None:
        """Nothing has to run."""

    def open(self, task: Task | None = None) -> None:
        """Nothing is made: the results are there."""

    def close(self) -> None:
        """Nothing is held."""

    def build(self, configs: Sequence[Config]) -> list[BuiltConfig]:
        """The stored result of each build; twins have one code."""
        return [self._built(config) for config in configs]

    def gate(self, config: Config) -> Gated | Failed:
        """The stored verdict."""
        self.gated.append(config)
        trial = self._stored(config)
        if trial.failed is not None and trial.failed.stage != "build":
            return trial.failed
        return trial.gate or _UNJUDGED

    def sample(
        self, configs: Sequence[Config], rounds: int, min_ms: float, limit_us: float = math.inf
    ) -> list[tuple[float, ...] | Failed]:
        """As Measurer.sample, from the stored rounds."""
        drawn = [self._random.randrange(self._rounds) for _ in range(rounds)]
        self.measured += configs
        return [self._sampled(self._stored(config), drawn, limit_us) for config in configs]

    def _sampled(
        self, trial: Trial, drawn: Sequence[int], limit_us: float
    ) -> tuple[float, ...] | Failed:
        if trial.failed is not None:
            return trial.failed
        base = self._study.trials[self._study.default].screening
        own = trial.screening
        values = []
        for draw in drawn:
            at = draw % len(own)
            there = base[trial.start + at]
            values.append(own[at] / there * base[draw % len(base)])
            if values[0] > limit_us:
                break
        return tuple(values)

    def _stored(self, config: Config) -> Trial:
        trial = self._trials.get(config)
        if trial is None:
            return Trial(config, failed=Failed("prepare", "Unknown", "the study lacks it"))
        if trial.same_code_as is not None:
            return self._study.trials[trial.same_code_as]
        if not trial.screening and trial.failed is None:
            return Trial(config, failed=Failed("run", "Untimed", "the study did not time it"))
        return trial

    def _built(self, config: Config) -> BuiltConfig:
        trial = self._trials.get(config, Trial(config))
        place, twin = self._place.get(config, -1), trial.same_code_as
        failed = trial.failed
        if failed is not None and failed.stage not in ("infeasible", "build", "resources"):
            failed = None
        return BuiltConfig(
            config,
            registers=trial.registers,
            spills=trial.spills,
            shared_memory=trial.shared_memory,
            code_hash=f"replayed {place if twin is None else twin}",
            failed=failed,
        )
