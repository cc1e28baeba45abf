"""merge(): records of many directories in one, the better one of each key, conflicts listed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flexattn.errors import CacheError
from flexattn.kernels.base.config import describe
from flexattn.records.record import Record
from flexattn.records.store import REAL, Store

# What was timed with the user's own mods says more than with rebuilt ones, and those more than
# what a model or a replay says.
_RANK = {"measured": 3, "untuned": 2, "replay": 1, "model": 0}


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two records of one key in one environment whose winners differ; the better one is kept."""

    kept: Record
    dropped: Record
    kept_from: Path
    dropped_from: Path

    def __str__(self) -> str:
        key = self.kept.key
        return (
            f"{self.kept.title or key.kind} {key.sizes}: {describe(self.kept.config)} of "
            f"{self.kept_from} over {describe(self.dropped.config)} of {self.dropped_from}"
        )


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge did: files written, kept as they were, of the same winner, and refused."""

    written: int
    kept: int
    conflicts: tuple[Conflict, ...]
    refused: tuple[tuple[Path, str], ...]


def quality(record: Record) -> tuple[int, int, str, float, str]:
    """What better means, as something to compare: the larger one wins.

    Provenance first, then the rounds that the winner was raced for, then the date, then the
    winner's median, the smaller the better; its text last, so that no order of sources matters.
    """
    winner = record.trials[record.decision.winner]
    samples = winner.finals or winner.screening
    median = statistics.median(samples) if samples else float("inf")
    return (
        _RANK[record.provenance],
        len(winner.finals),
        record.made,
        -median,
        describe(record.config),
    )


def better(new: Record, old: Record) -> bool:
    """Whether a record replaces another one of its key: for `Store.write(replace=better)`."""
    return quality(new) > quality(old)


def merge(
    sources: Iterable[Path], target: Path, say: Callable[[str], None] = lambda text: None
) -> Merged:
    """Bring the records of several roots into one; the sources stay as they are.

    The result does not depend on the sources' order. Files that are no records, and replays, are
    refused and listed. Raises OSError where the target cannot be written.
    """
    into = Store(target)
    origins: dict[Path, Path] = {}
    written = kept = 0
    conflicts: list[Conflict] = []
    refused: list[tuple[Path, str]] = []
    for root in sources:
        for path, record in Store(root).entries():
            if isinstance(record, CacheError):
                refused.append((path, record.line))
                continue
            if record.provenance not in REAL:
                refused.append((path, f"a {record.provenance} record stays where it is"))
                continue
            place = into.path(record.environment, record.key)
            old = into.read(record.environment, record.key)
            wins = into.write(record, replace=better)
            if old is not None and old.config != record.config:
                here, there = path, origins.get(place, place)
                pair = (record, old, here, there) if wins else (old, record, there, here)
                conflicts.append(Conflict(*pair))
            if wins:
                origins[place] = path
                say(f"{path}")
            written, kept = written + wins, kept + (not wins)
    return Merged(written, kept, tuple(conflicts), tuple(refused))
