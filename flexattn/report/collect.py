"""Records to report on: files that are named, or all of a cache's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flexattn.errors import CacheError, InputError
from flexattn.records.codec import decode_record
from flexattn.records.record import Record
from flexattn.records.store import Store

UNTIMED = "ranked by a model, nothing was timed"


def from_files(paths: Iterable[Path]) -> tuple[Record, ...]:
    """The records of files; a folder stands for every .json file below it that is a record.

    Raises InputError for a named file that is no record.
    """
    found = []
    for path in paths:
        if path.is_dir():
            found += [record for each in sorted(path.rglob("*.json")) if (record := _tried(each))]
        else:
            found.append(_read(path))
    return in_order(found)


def from_stores(stores: Iterable[Store]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """All valid records of caches, and a line about each file that is none."""
    records, faults = [], []
    for store in stores:
        for _, entry in store.entries():
            if isinstance(entry, CacheError):
                faults.append(entry.line)
            elif entry.provenance == "model":
                faults.append(f"{entry.title} for {entry.environment.device}: {UNTIMED}")
            else:
                records.append(entry)
    return in_order(records), tuple(faults)


def in_order(records: Iterable[Record]) -> tuple[Record, ...]:
    """By device, kind and title, then by size: a page of equal records is equal."""
    return tuple(
        sorted(records, key=lambda r: (r.environment.device, r.key.kind, r.title, r.sizes))
    )


def _read(path: Path) -> Record:
    try:
        record = decode_record(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "a record is a file") from error
    except CacheError as error:
        raise InputError(
            f"{path} is no record: {error.got}", error.rule, "name a file that the tuner wrote"
        ) from error
    if record.provenance == "model":
        raise InputError(f"{path}: {UNTIMED}", "a page shows times")
    return record


def _tried(path: Path) -> Record | None:
    try:
        record = decode_record(path.read_bytes())
    except (OSError, CacheError):
        return None  # a manifest, or a file of something else
    return None if record.provenance == "model" else record
