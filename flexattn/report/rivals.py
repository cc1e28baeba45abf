"""Ours beside torch: the rows of a bench's JSON, with paired ratios, as the report shows them."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexattn.errors import InputError
from flexattn.measure.timing import NO_RATIO, Ratio, Samples, paired_ratio

_SCHEMA, _OURS = 1, "flexattn"


@dataclass(frozen=True, slots=True)
class Rival:
    """Another kernel's time on a row: median microseconds, and its time over ours, paired."""

    name: str
    us: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class RivalRow:
    """One row of a bench: our median in microseconds, NaN where ours has none, and the rivals'."""

    name: str
    us: float
    rivals: tuple[Rival, ...]

    def rival(self, name: str) -> Rival | None:
        """The rival of a name, if it ran this row."""
        return next((rival for rival in self.rivals if rival.name == name), None)


@dataclass(frozen=True, slots=True)
class BenchResults:
    """The results of one bench: its name, the machine in words, its rows."""

    name: str
    machine: str
    rows: tuple[RivalRow, ...]

    @property
    def rivals(self) -> tuple[str, ...]:
        """Every rival's name once, in the order of the rows."""
        return tuple(dict.fromkeys(rival.name for row in self.rows for rival in row.rivals))

    def row(self, title: str) -> RivalRow | None:
        """The row of a problem of this title, however its words are joined."""
        return next((row for row in self.rows if _plain(row.name) == _plain(title)), None)


def read_bench(path: Path) -> BenchResults:
    """The results that `python -m bench.…` or `flexattn bench --json` wrote.

    Raises InputError for any other file.
    """
    try:
        data = json.loads(path.read_text())
        return from_verb(data) if "schema" not in data else _from_project(data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "--bench names a file") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no bench's result: {type(error).__name__}: {error}",
            f"it is JSON of schema {_SCHEMA}, or what `flexattn bench --json` prints",
        ) from error


def _from_project(data: dict[str, Any]) -> BenchResults:
    """All samples of every row, as the scripts of bench/ save them."""
    if data["schema"] != _SCHEMA:
        raise ValueError(f"schema {data['schema']!r}")
    machine = ", ".join(f"{name} {value}" for name, value in data["environments"][0].items())
    return BenchResults(str(data["bench"]), machine, tuple(_row(row) for row in data["rows"]))


def from_verb(data: dict[str, Any]) -> BenchResults:
    """Medians and paired ratios of every row, as the verb prints them."""
    return BenchResults("flexattn bench", str(data["device"]), tuple(map(_told, data["rows"])))


def geometric_mean(bench: BenchResults, rival: str) -> float:
    """Geometric mean of a rival's time over ours; NaN where no row has both."""
    ratios = [
        each.ratio.value
        for row in bench.rows
        for each in row.rivals
        if each.name == rival and each.ratio.value > 0
    ]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def _row(data: dict[str, Any]) -> RivalRow:
    samples = {
        str(name): Samples(tuple(float(us) for us in each["us"]))
        for name, each in data["samples"].items()
        if each["us"] and _green(data, name)
    }
    ours = samples.pop(_OURS, Samples())
    rivals = tuple(Rival(name, each.median, _ratio(each, ours)) for name, each in samples.items())
    return RivalRow(str(data["name"]), ours.median, rivals)


def _told(data: dict[str, Any]) -> RivalRow:
    us, ratios = (
        {str(name): float(value) for name, value in data[field].items() if value is not None}
        for field in ("us", "ratio")
    )
    ours = us.pop(_OURS, math.nan) if data["passed"] else math.nan
    known = {} if math.isnan(ours) else ratios
    rivals = tuple(
        # The verb keeps no interval of a ratio.
        Rival(name, each, replace(NO_RATIO, value=known.get(name, math.nan)))
        for name, each in us.items()
        if name != _OURS
    )
    return RivalRow(str(data["title"]), ours, rivals)


def _green(data: dict[str, Any], name: str) -> bool:
    gate = data.get("gates", {}).get(name)
    return gate is None or bool(gate["passed"])


def _ratio(rival: Samples, ours: Samples) -> Ratio:
    if len(rival.us) != len(ours.us) or not ours.us:
        return NO_RATIO
    return paired_ratio(rival, ours)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
