"""Store: one directory of records, a file for each key, each written whole or not at all.

    <root>/v1/nvidia-h200-0123456789ab/manifest.json                  the environment, spelled out
    <root>/v1/nvidia-h200-0123456789ab/<family>/b8-q1-k8192.json      one record

The names are digests of an environment and of a key's family, and the key's sizes: none comes from
a file's contents. A lookup opens one file and takes no lock; neighbours are found by listing one
directory. What is no record is a miss and said once; a writer moves it aside to a `.bad` name.
merge() brings the records of several roots into one: the better one of each key, conflicts listed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

from flexattn.errors import CacheError
from flexattn.kernels.base.config import describe
from flexattn.records.codec import MAX_BYTES, decode_answer, decode_record, encode, encode_record
from flexattn.records.record import SCHEMA, Answer, Environment, Key, Record, Sizes, slug
from flexattn.settings import say_once
from flexattn.util.files import aside, listing, locked, publish, read_regular

_T = TypeVar("_T", Answer, Record)

_NAME = re.compile(r"b(\d{1,15})-q(\d{1,15})-k(\d{1,15})\.json")
_written = count()
_generation = [0]


def generation() -> int:
    """A number that changes when this process writes a record or finds a kernel wrong: what was
    looked up may be old.
    """
    return _generation[0]


def renew() -> None:
    """Make all that was looked up old."""
    _generation[0] = next(_written) + 1


class Store:
    """The records below one root, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._base = root / f"v{SCHEMA}"
        # A text, because pathlib would take a fifth of a lookup.
        self._text = str(self._base)

    def path(self, environment: Environment | str, key: Key) -> Path:
        """The file of a key in an environment (or in the folder of one)."""
        return Path(self._base, *self._names(environment, key))

    def _names(self, environment: Environment | str, key: Key) -> tuple[str, str, str]:
        folder = environment if isinstance(environment, str) else environment.folder
        return folder, key.family(), f"{key.sizes}.json"

    def read(self, environment: Environment | str, key: Key) -> Record | None:
        """The whole record of a key; None where there is none that is valid."""
        return self._sound(environment, key, decode_record)

    def answer(self, environment: Environment | str, key: Key) -> Answer | None:
        """As `read`, without the trials and in microseconds."""
        where = None if isinstance(environment, str) else environment
        return self._sound(environment, key, lambda raw: decode_answer(raw, key, where))

    def _sound(
        self, environment: Environment | str, key: Key, decode: Callable[[bytes], _T]
    ) -> _T | None:
        names = self._names(environment, key)
        path = os.path.join(self._text, *names)
        try:
            return self._load(path, names[0], decode, key)
        except CacheError as error:
            say_once(f"not used, as if it were not there: {error.line}")
            return None

    def _load(
        self, path: str | Path, folder: str, decode: Callable[[bytes], _T], key: Key | None = None
    ) -> _T | None:
        """The record of a file, None without the file; raises CacheError for any other file."""
        raw = read_regular(path, MAX_BYTES)
        if raw is None:
            return None
        try:
            found = decode(raw)
            if found.environment.folder != folder:
                raise CacheError("it is the record of another environment")
            if found.key != (key or found.key):
                raise CacheError("it is the record of another key")
            return found
        except CacheError as error:
            raise CacheError(f"{path}: {error.got}", error.rule) from None

    def folders(self, device: str = "") -> list[str]:
        """Names of the environments there are, of all devices or of one, in order."""
        names = listing(self._base)
        if device:
            names = [name for name in names if name.rpartition("-")[0] == slug(device)]
        return sorted(name for name in names if not name.startswith("."))

    def sizes(self, folder: str, family: str) -> list[Sizes]:
        """The sizes that a family has records for in an environment's folder, by file names."""
        matches = map(_NAME.fullmatch, listing(self._base / folder / family))
        return sorted(Sizes(*map(int, match.groups())) for match in matches if match)

    def strays(self) -> list[Path]:
        """Files that no reader looks at: those moved aside, and those of writers that died.

        None in a folder that may not be looked into.
        """
        with suppress(PermissionError):
            return sorted(p for p in self._base.rglob("*") if p.suffix in (".bad", ".tmp"))
        return []

    def paths(self) -> Iterator[Path]:
        """Every file that is named like a record, in order."""
        for folder in self.folders():
            for family in sorted(listing(self._base / folder)):
                for name in sorted(listing(self._base / folder / family)):
                    if _NAME.fullmatch(name):
                        yield self._base / folder / family / name

    def entries(self) -> Iterator[tuple[Path, Record | CacheError]]:
        """Every file with its record, or with what is wrong with it."""
        return self._each(decode_record)

    def answers(self) -> Iterator[tuple[Path, Answer | CacheError]]:
        """As `entries`, without trials: for lists and comparisons of thousands."""
        return self._each(decode_answer)

    def _each(self, decode: Callable[[bytes], _T]) -> Iterator[tuple[Path, _T | CacheError]]:
        for path in self.paths():
            try:
                found = self._load(path, path.parts[-3], decode)
                if found is None:
                    continue
                if self.path(found.environment, found.key) != path:
                    raise CacheError(f"{path}: it is the record of another key")
                yield path, found
            except CacheError as error:
                yield path, error

    def write(
        self, record: Record, replace: bool | Callable[[Record, Record], bool] = False
    ) -> bool:
        """Publish a record at once; says whether it was written.

        One that is there stays, unless `replace` is True or says so of (new, old). A file that
        is no record is moved aside first. Raises OSError where the disk refuses.
        """
        path, text = self.path(record.environment, record.key), encode_record(record)
        decode_record(text.encode())  # what readers would refuse is refused here
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent.parent
        with locked(folder):
            if not self._makes_way(path, record, replace):
                return False
            if not (folder / "manifest.json").exists():
                manifest = json.dumps(encode(record.environment), indent=1) + "\n"
                publish(folder / "manifest.json", manifest)
            publish(path, text)
        renew()
        return True

    def drop_others(self, environment: Environment, key: Key) -> list[Path]:
        """Remove a key's records of the device's other environments; the files that were there.

        Those of another Triton stay: they are hits where that one is installed. A folder without
        records goes too. Others of the key's family stay, as hints.
        """
        names = [name for name in self.folders(environment.device) if name != environment.folder]
        dropped = []
        for name in names:
            path, old = self.path(name, key), self.read(name, key)
            if old is not None and old.environment.triton != environment.triton:
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                dropped.append(path)
            folder = path.parent.parent
            with suppress(OSError):
                path.parent.rmdir()  # refused while it holds a record
            if set(listing(folder)) <= {"manifest.json", ".lock"}:
                shutil.rmtree(folder, ignore_errors=True)
        if dropped:
            renew()
        return dropped

    def _makes_way(
        self, path: Path, record: Record, replace: bool | Callable[[Record, Record], bool]
    ) -> bool:
        try:
            old = self._load(path, path.parts[-3], decode_record, record.key)
        except CacheError as error:
            elsewhere = aside(path)
            os.rename(path, elsewhere)
            say_once(f"moved aside to {elsewhere.name}: {error.line}")
            return True
        return old is None or replace is True or (callable(replace) and replace(record, old))


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
    """The result of a merge: files written, kept as they were, of the same winner, and refused."""

    written: int
    kept: int
    conflicts: tuple[Conflict, ...]
    refused: tuple[tuple[Path, str], ...]


def quality(record: Record) -> tuple[int, int, str, float, str]:
    """The order of records of one key: the larger one wins.

    Provenance first, then the rounds that the winner was raced for, then the date, then the
    winner's median, the smaller the better; its text last, so that no order of sources matters.
    """
    winner = record.trials[record.decision.winner]
    samples = winner.finals or winner.screening
    median = statistics.median(samples) if samples else float("inf")
    return (
        # What was timed with the user's own mods says more than with rebuilt ones.
        record.provenance == "measured",
        len(winner.finals),
        record.made,
        -median,
        describe(record.config),
    )


def better(new: Record, old: Record) -> bool:
    """True if a record replaces another one of its key: for `Store.write(replace=better)`."""
    return quality(new) > quality(old)


def merge(sources: Iterable[Path], target: Path) -> Merged:
    """Bring the records of several roots into one; the sources stay as they are.

    The result does not depend on the sources' order. Files that are no records are refused
    and listed. Raises OSError where the target cannot be written.
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
            place = into.path(record.environment, record.key)
            old = into.read(record.environment, record.key)
            wins = into.write(record, replace=better)
            if old is not None and old.config != record.config:
                here, there = path, origins.get(place, place)
                pair = (record, old, here, there) if wins else (old, record, there, here)
                conflicts.append(Conflict(*pair))
            if wins:
                origins[place] = path
            written, kept = written + wins, kept + (not wins)
    return Merged(written, kept, tuple(conflicts), tuple(refused))
