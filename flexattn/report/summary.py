"""Summary: one record as the report's tables say it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flexattn.kernels.choose.registry import short
from flexattn.measure.timing import Ratio
from flexattn.records.record import Record, Trial
from flexattn.report.numbers import (
    Reach,
    Reason,
    Timed,
    comparable,
    gain,
    limits_of,
    reach,
    timed,
    untimed_reasons,
)
from flexattn.report.rivals import BenchResults


@dataclass(frozen=True, slots=True)
class Side:
    """The default or the winner: its trial, its time and its share of the device's limits.

    time, reach: None where it has no time.
    """

    trial: Trial
    time: Timed | None
    reach: Reach | None

    @property
    def config(self) -> str:
        """The config in short."""
        return short(self.trial.config)

    @property
    def us(self) -> float | None:
        """The median in microseconds."""
        return self.time.us if self.time else None


@dataclass(frozen=True, slots=True)
class Summary:
    """A record with what the page says of it.

    gain: the default's time over the winner's, paired. torch: the best rival of the bench whose
    name starts with torch, and its time over ours. missing: sentences about what could not be
    computed.
    """

    record: Record
    problem: str
    default: Side
    winner: Side
    gain: Ratio
    timed: int
    reasons: tuple[Reason, ...]
    torch: tuple[str, float] | None
    missing: tuple[str, ...]

    @property
    def title(self) -> str:
        """The record's title, or the digest of its key."""
        return self.record.title or self.record.key.digest()

    @property
    def device(self) -> str:
        """The device's name."""
        return self.record.environment.device

    @property
    def model(self) -> str:
        """The workload's name, with which its titles begin."""
        return (self.title.split() or [self.title])[0]

    @property
    def changed(self) -> bool:
        """True if the winner is not the static default."""
        return self.record.decision.winner != self.record.decision.default

    @property
    def speedup(self) -> float | None:
        """The gain; None where the default has no time in the winner's rounds."""
        return None if math.isnan(self.gain.value) else self.gain.value

    @property
    def untimed(self) -> int:
        """The number of configs without a time."""
        return sum(reason.count for reason in self.reasons)


def summarize(record: Record, benches: tuple[BenchResults, ...] = ()) -> Summary:
    """Everything the page says about a record, without the pictures."""
    decision, ratio = record.decision, gain(record)
    return Summary(
        record,
        _problem(record),
        _side(record, decision.default),
        _side(record, decision.winner),
        ratio,
        len(timed(record)),
        untimed_reasons(record),
        _best_torch(record, benches),
        tuple(_missing(record, math.isnan(ratio.value))),
    )


def _missing(record: Record, unpaired: bool) -> Iterator[str]:
    """Sentences on what could not be computed, and why."""
    device, times, same = record.environment.device, timed(record), comparable(record)
    if not times:
        yield "No config has a time, so there is nothing to draw."
        return
    if unpaired:
        yield "The default and the winner share no round, so there is no speedup."
    if len(times) == 1:
        yield "One config was timed, so there is nothing to compare it with."
    if others := len(times) - len(same):
        which = f"{others} configs are" if others > 1 else "One config is"
        yield (
            f"{which} of another template than the winner's, which has other numbers: only the "
            "list of all configs and the roofline show them."
        )
    if limits_of(device) is None:
        yield f"The limits of {device} are not in the table of known devices, so no share of them."
    if not record.trials[record.decision.winner].registers:
        yield "The compiler's registers and shared memory were not recorded."


def _problem(record: Record) -> str:
    """Kind, dtype, heads and sizes as they were measured, and what the mods are, in one line."""
    key, (B, q_len, kv_len) = record.key, record.sizes
    dims = str(key.head_dim_qk)
    if key.head_dim_v != key.head_dim_qk:
        dims += f"/{key.head_dim_v}"
    sizes = f"B={B} Hq={key.Hq} Hkv={key.Hkv} q_len={q_len} kv_len={kv_len} D={dims}"
    parts = [f"{key.kind} {key.dtype} {sizes}"]
    parts += ["score_mod"] * bool(key.score) + ["mask_mod"] * bool(key.mask)
    if key.blocks:
        parts.append(f"blocks {key.blocks}")
    if key.mask_class:
        parts.append(f"mask class {key.mask_class}")
    if key.precision:
        parts.append(key.precision)
    return ", ".join(parts)


def _side(record: Record, index: int) -> Side:
    found = next((each for each in timed(record) if each.trial == index), None)
    return Side(record.trials[index], found, reach(record, found.us) if found else None)


def _best_torch(record: Record, benches: tuple[BenchResults, ...]) -> tuple[str, float] | None:
    """torch's own best on the bench's row of this title, with its time over ours."""
    found = [
        (rival.name, rival.ratio.value)
        for bench in benches
        if record.title and (row := bench.row(record.title)) is not None
        for rival in row.rivals
        if rival.name.startswith("torch") and not math.isnan(rival.ratio.value)
    ]
    return min(found, key=lambda each: each[1], default=None)
