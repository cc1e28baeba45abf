"""Trials as lines of a file, each with its differences from the first of its kind, and back.

The first trial is whole. In the others a field of `config` or `gate` that is missing is what the
first trial with that `type` of config, or that `name` of a gate, says; a missing type or name is
the first trial's. Lines in which nothing is missing, as files of earlier versions have, read alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from flexattn.records.record import Trial

# The parts of a trial that repeat, with the field that names their kind.
KINDS = {"config": "type", "gate": "name"}
# A part with more fields is no config and no gate, and copies of it could fill the memory.
_MOST = 64


def lines(trials: Sequence[Trial], encode: Callable[[Any], Any]) -> str:
    """A line of JSON for each trial; encode: of a field's value."""
    first: dict[str, Any] = {}
    rows = [_differing(_told(trial, encode), first) for trial in trials]
    return ",\n".join(json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows)


def whole(rows: Any) -> Any:
    """The lines as parsed, each with all its fields; what is no such line stays as it is."""
    first: dict[str, Any] = {}
    return [_filled(row, first) for row in rows] if type(rows) is list else rows


def _told(trial: Trial, encode: Callable[[Any], Any]) -> dict[str, Any]:
    """A trial without the fields that say nothing: most have no twin, and many no failure."""
    told = ((field, getattr(trial, field.name)) for field in fields(trial))
    return {field.name: encode(value) for field, value in told if value != field.default}


def _differing(row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    for part, kind in KINDS.items():
        if part in row:
            data = row[part]
            named, base = _first(data[kind], part, data, first)
            if base is not data:
                short = {name: each for name, each in data.items() if base[name] != each}
                row[part] = short if named == data[kind] else {kind: data[kind], **short}
    return row


def _filled(row: Any, first: dict[str, Any]) -> Any:
    if type(row) is not dict:
        return row
    for part, kind in KINDS.items():
        data = row.get(part)
        if type(data) is not dict or len(data) > _MOST:
            continue
        name = data.get(kind, first.get(part))
        if type(name) is str:
            _, base = _first(name, part, data, first)
            row[part] = {**base, **data}
    return row


def _first(
    name: str, part: str, data: dict[str, Any], first: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The first kind of a part, and the first data of this one; they are noted if these are."""
    return first.setdefault(part, name), first.setdefault(f"{part} {name}", data)
