"""Stored measurements: records and studies as problems, with the times of their configs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from bench.studies import load_study, stored
from bench.tasks import STUDIED, task
from flexattn.device import Device, named
from flexattn.presets import files
from flexattn.problem import Problem
from flexattn.records.codec import decode_record
from flexattn.records.layers import TOOLCHAIN_FIELDS
from flexattn.records.record import Key, Trial, common_rounds, key_of, timed_for
from flexattn.records.store import Store
from flexattn.tuning.tasks import plan_task, task_of
from flexattn.tuning.workload import Row, read

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Measured:
    """One record or study. times: microseconds a call by config, of those that passed the gate.

    path: of its file. Times of one record alone compare with each other: all of them are the time
    of the config that all ran beside, times what the rounds' ratios say.
    """

    title: str
    triton: str
    problem: Problem
    device: Device
    times: dict[Any, float]
    path: Path

    @property
    def kind(self) -> str:
        """Of the problem: prefill, decode, backward, or serving."""
        problem = self.problem
        return problem.structure.kind

    def time(self, config: Any) -> float | None:
        """Of a config, or of one that is it but for how it is compiled; None without either."""
        if config in self.times:
            return self.times[config]
        same = (us for each, us in self.times.items() if tiles_of(each) == tiles_of(config))
        return min(same, default=None)


def tiles_of(config: Any) -> Any:
    """A config of any family without what says how it is compiled."""
    changed = {name: value for name, value in TOOLCHAIN_FIELDS.items() if hasattr(config, name)}
    return replace(config, **changed)


def measured(root: Path = CONFIGS) -> Iterator[Measured]:
    """Every record of the presets, then every study, in the order of their paths."""
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and p.name != "studies"):
        for path in Store(folder).paths():
            record = decode_record(path.read_bytes())
            device = named(record.environment.device)
            problem = _problem(record.title, record.key, device)
            if problem is not None:
                found = times(record.trials, record.decision.default)
                yield Measured(
                    record.title, record.environment.triton, problem, device, found, path
                )
    rows = {row.name: row for row in STUDIED}
    for path in stored(root / "studies"):
        study = load_study(path)
        device = named(study.environment.device)
        problem = task(rows[path.stem], device, "cpu").problem
        found = times(study.trials, study.default)
        yield Measured(study.title, study.environment.triton, problem, device, found, path)


def times(trials: Sequence[Trial], beside: int) -> dict[Any, float]:
    """Microseconds by config: the median of `beside`, times the median ratio of common rounds."""
    base = trials[beside]
    unit = statistics.median(base.finals or base.screening)
    found = paired(trials, beside)
    return {
        config: unit * statistics.median(own / other for own, other in pairs)
        for config, pairs in found.items()
    }


def paired(trials: Sequence[Trial], beside: int) -> dict[Any, list[tuple[float, float]]]:
    """Times of each config that passed the gate, each with that of `beside` in the same round."""
    found = {}
    for index, trial in enumerate(trials):
        ran = timed_for(trials, index)
        good = ran.failed is None and (ran.gate is None or ran.gate.passed)
        if good and (pairs := common_rounds(trials, index, beside)):
            found[trial.config] = pairs
    return found


def _problem(title: str, key: Key, device: Device) -> Problem | None:
    """Of the preset's row that a record was made for; None where no row has its key any more."""
    problems = (_of_row(row, device) for row in _rows().get(title, ()))
    return next((each for each in problems if key_of(each) == key), None)


@lru_cache(maxsize=1)
def _rows() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for path in files().values():
        for row in read(path).rows:
            found.setdefault(row.title, []).append(row)
    return found


@lru_cache(maxsize=1024)
def _of_row(row: Row, device: Device) -> Problem:
    if row.served:
        return plan_task(row, device).problem
    return task_of(row, device, torch.device("cpu")).problem
