"""Journal: the finished screening batches of a tuning that was cut short, to go on from.

Times of two runs compare only as ratios to the default of the same run: the journal keeps whole
batches, each with the default's samples. It is append-only, and goes when the record is on the
disk: not before, or a process that dies between loses both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexattn.errors import CacheError
from flexattn.records.codec import decode, encode
from flexattn.records.record import Provenance, Record, Trial
from flexattn.tune.subject import Subject


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial with the hash of its machine code ("" where it was not built)."""

    trial: Trial
    code: str


class Journal:
    """One file a study: a line for each batch, the default first.

    provenance: of the record; a mask and captures that were made up are not the user's.
    """

    def __init__(
        self, folder: Path, of: Subject | Record, provenance: Provenance = "measured"
    ) -> None:
        # All that must be equal for samples to be of one study; which configs there are may grow.
        same = (of.key, tuple(of.sizes), of.environment, of.policy, provenance)
        self.path = folder / f"{hashlib.sha256(repr(same).encode()).hexdigest()[:32]}.jsonl"

    def append(self, entries: Sequence[Entry]) -> None:
        """Keep one batch."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([encode(entry) for entry in entries]) + "\n")

    def batches(self) -> Iterator[tuple[Entry, ...]]:
        """What earlier runs finished; a line that a dying process left half is skipped."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            try:
                data: Any = json.loads(line)
                yield decode(tuple[Entry, ...], data, "journal")
            except (ValueError, RecursionError, CacheError):
                continue

    def drop(self) -> None:
        """The record is written: nothing is left to go on from."""
        self.path.unlink(missing_ok=True)


def settle(folder: Path, record: Record, until: float = math.inf) -> None:
    """Drop the journal of a record that is on the disk.

    until: seconds of the clock; a journal that was written to later is of a later tuning.
    """
    journal = Journal(folder, record, record.provenance)
    with contextlib.suppress(FileNotFoundError):
        if journal.path.stat().st_mtime <= until:
            journal.drop()
