"""The results of a bench: JSON with every sample, and slices of rows merged into one file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexattn.errors import InputError
from flexattn.measure.timing import Samples
from flexattn.records.record import Failed

SCHEMA = 1


@dataclass(frozen=True)
class Gate:
    """The verdict of the accuracy gate on one of our variants."""

    passed: bool
    message: str = "passed"

    @classmethod
    def of(cls, wrong: str) -> Gate:
        """The gate of a check that names what is wrong, "" where nothing is."""
        return cls(not wrong, wrong or "passed")


@dataclass(frozen=True)
class RowResult:
    """One row: its useful work, the gates of our variants, the samples or refusal of each peer.

    A peer that refused the row, or whose gate is red, has a reason in `refused` and no samples.
    memory: of a backward, what each peer allocated at its peak in bytes, inputs included, and
    under "bar" what it may.
    """

    name: str
    group: str
    flops: float
    kv_bytes: int
    gates: dict[str, Gate] = dataclasses.field(default_factory=dict)
    samples: dict[str, Samples] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: int = 0
    clocks: dict[str, str] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All rows of a bench, each with the index of the environment it was measured in."""

    bench: str
    method: dict[str, Any]
    environments: tuple[dict[str, str], ...]
    rows: tuple[RowResult, ...]


def save(report: Report, path: Path) -> None:
    """Write the report as JSON, atomically; what is None, {} or "passed" is left out.

    Samples have nine significant digits: nanoseconds up to a second.
    """
    data = dataclasses.asdict(report, dict_factory=_there)
    write({"schema": SCHEMA} | data, path)


def _there(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {name: value for name, value in items if value not in (None, {}, "passed")}
    if "us" in found:
        found["us"] = [float(f"{us:.9g}") for us in found["us"]]
    return found


def write(data: dict[str, Any], path: Path) -> None:
    """Write a bench's data as JSON, atomically: a line for each key, and each item of a list."""

    def laid_out(value: Any) -> str:
        if isinstance(value, list | tuple) and value:
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    lines = (f" {json.dumps(key)}: {laid_out(value)}" for key, value in data.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Report:
    """Read what `save` wrote. Raises InputError for another schema."""
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"{path} has schema {data.get('schema')!r}",
            f"this version reads schema {SCHEMA}",
            "run the bench again",
        )
    rows = tuple(_row(row) for row in data["rows"])
    return Report(data["bench"], data.get("method", {}), tuple(data["environments"]), rows)


def merge(reports: list[Report]) -> Report:
    """One report of all rows; where two have a row of one name, the later report's stands.

    Reports may differ in how many samples they took. Raises InputError if they differ in anything
    else of the method, or are of different benches: such rows do not belong in one table.
    """
    kinds = {json.dumps([r.bench, _kind(r.method)], sort_keys=True) for r in reports}
    if len(kinds) != 1:
        raise InputError(
            "reports to merge: " + (" and ".join(sorted(kinds)) or "none"),
            "one bench, measured in one way",
            "run the missing slices with the same options",
        )
    environments: list[dict[str, str]] = []
    rows: dict[str, RowResult] = {}
    for report in reports:
        for row in report.rows:
            where = report.environments[row.environment]
            if where not in environments:
                environments.append(where)
            rows[row.name] = dataclasses.replace(row, environment=environments.index(where))
    first = reports[0]
    return Report(first.bench, first.method, tuple(environments), tuple(rows.values()))


def _kind(method: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in method.items() if key not in ("rounds", "min_ms")}


def _row(data: dict[str, Any]) -> RowResult:
    gates = {name: Gate(**gate) for name, gate in data.get("gates", {}).items()}
    samples = {name: _samples(value) for name, value in data.get("samples", {}).items()}
    return RowResult(**(data | {"gates": gates, "samples": samples}))


def _samples(data: dict[str, Any]) -> Samples:
    failure = Failed(**data["failure"]) if data.get("failure") else None
    return Samples(tuple(data["us"]), failure, data["calls"])
