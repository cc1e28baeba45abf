"""Study: every config of a problem with its samples, as a file; and the Measurer of one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexattn.errors import CacheError
from flexattn.kernels.base.config import Config
from flexattn.measure.task import Task
from flexattn.records.codec import decode, encode, lines, whole_trials
from flexattn.records.record import SCHEMA, Environment, Failed, Gated, Key, Policy, Trial
from flexattn.tuning.builds import BuiltConfig
from flexattn.tuning.evaluator import Subject
from flexattn.util.files import publish

_MAX_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Study:
    """An exhaustive measurement: trials[i].screening pairs with the default's from `start` on.

    A trial has samples or a failure; samples of a config that was stopped early are fewer.
    """

    schema: int
    key: Key
    sizes: tuple[int, int, int]
    environment: Environment
    policy: Policy
    default: int
    trials: tuple[Trial, ...]
    rejected: tuple[tuple[str, int], ...] = ()
    title: str = ""
    made: str = ""
    tool: str = ""

    @property
    def subject(self) -> Subject:
        """The problem without its answers."""
        return Subject(
            self.key,
            self.sizes,
            self.environment,
            self.policy,
            tuple(trial.config for trial in self.trials),
            self.default,
            self.rejected,
            self.title,
        )


def save(study: Study, path: Path) -> None:
    """Write a study, a line for each config, as records have them."""
    head = encode(study)
    del head["trials"]
    text = json.dumps(head, separators=(",", ":"))[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, f'{text},"trials":[\n{lines(study.trials, encode)}\n]}}\n')


def load_study(path: Path) -> Study:
    """Read a study; raises CacheError for anything that is none."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CacheError(f"{path}: too large", f"a study has at most {_MAX_BYTES} bytes")
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CacheError(f"{path}: {error}", "a study is a readable file") from error


def loads(text: str) -> Study:
    """A study from its text, every field checked; raises CacheError."""
    try:
        data = json.loads(text)
        if type(data) is dict and "trials" in data:
            data["trials"] = whole_trials(data["trials"])
    except (ValueError, RecursionError) as error:
        raise CacheError(f"no JSON: {str(error)[:200]}") from None
    study: Study = decode(Study, data, "study")
    if study.schema != SCHEMA:
        raise CacheError(f"schema {study.schema}", f"this version reads schema {SCHEMA}")
    if study.default >= len(study.trials) or not study.trials[study.default].screening:
        raise CacheError("no samples of the default", "it is what the others are compared with")
    for trial in study.trials:
        twin = trial.same_code_as
        if twin is not None and twin >= len(study.trials):
            raise CacheError(f"same_code_as {twin}", "it is the index of a trial")
    return study


def stored(folder: Path) -> Iterator[Path]:
    """The studies below a folder, in order."""
    yield from sorted(folder.rglob("*.json"))


# What a study does not know of a config that was never gated.
_UNJUDGED = Gated("not judged in the study", 0.0, 0.0, 0.0, True)


class ReplayMeasurer:
    """Times drawn from a study: each round draws one of its rounds, the same for all configs.

    A stored batch is brought to the first one's level by the default, which ran in each. A seed
    gives the same times again.
    """

    provenance = "replay"

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
