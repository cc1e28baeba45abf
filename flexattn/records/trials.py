"""Trials as lines of a file: the names of the columns, then a list for each trial, and back.

What follows a trial's last entry that says something is left out. A field of `config` or `gate`
that is missing is what the first one of that `type`, or of that `name`, says; a missing type or
name is the very first one's. The first config is the record's, and of a study the first trial's.
Files of earlier versions have an object for each trial, in which nothing is missing: they read
alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from flexattn.records.record import Trial

# The parts of a trial that repeat, with the field that names their kind.
_KINDS = {"config": "type", "gate": "name"}
# A part with more fields is no config and no gate, and copies of it could fill the memory.
_MOST = 64
_DEFAULTS = {field.name: field.default for field in fields(Trial)}


def lines(
    trials: Sequence[Trial], encode: Callable[[Any], Any], config: dict[str, Any] | None = None
) -> str:
    """The columns and a line of JSON for each trial.

    encode: makes JSON data of a field's value. config: the data of the first one, written before.
    """
    first = _known(config)
    rows = [list(_DEFAULTS), *(_row(trial, encode, first) for trial in trials)]
    return ",\n".join(map(compact, rows))


def compact(data: Any) -> str:
    """JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def whole_trials(rows: Any, config: Any = None) -> Any:
    """The lines as parsed, as an object with all its fields for each trial.

    What is no such line stays as it is: whoever decodes it says what is wrong. config: as above.
    """
    if type(rows) is not list:
        return rows
    if rows and type(rows[0]) is list:
        rows = [_named(rows[0], row) for row in rows[1:]]
    first = _known(config)
    return [_filled(row, first) for row in rows]


def _known(config: Any) -> dict[str, Any]:
    name = config.get("type") if type(config) is dict and len(config) <= _MOST else None
    return {"config": name, f"config {name}": config} if type(name) is str else {}


def _row(trial: Trial, encode: Callable[[Any], Any], first: dict[str, Any]) -> list[Any]:
    values = [getattr(trial, name) for name in _DEFAULTS]
    told = max(at for at, name in enumerate(_DEFAULTS, 1) if values[at - 1] != _DEFAULTS[name])
    return [
        _differing(name, encode(value), first) if name in _KINDS and value else encode(value)
        for name, value in zip(_DEFAULTS, values[:told], strict=False)
    ]


def _differing(part: str, data: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    kind = _KINDS[part]
    named, base = _first(data[kind], part, data, first)
    if base is data:
        return data
    short = {name: each for name, each in data.items() if base[name] != each}
    return short if named == data[kind] else {kind: data[kind], **short}


def _named(columns: list[Any], row: Any) -> Any:
    if type(row) is not list or len(row) > len(columns):
        return row
    names = [name if type(name) is str else "" for name in columns]
    return dict(zip(names, row, strict=False))


def _filled(row: Any, first: dict[str, Any]) -> Any:
    if type(row) is not dict:
        return row
    for part, kind in _KINDS.items():
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
