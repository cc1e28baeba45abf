"""Study: every config of a problem with its samples, as a file of `configs/studies`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexattn.errors import CacheError
from flexattn.records.codec import decode, encode, lines, whole_trials
from flexattn.records.record import SCHEMA, Environment, Key, Policy, Trial
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
