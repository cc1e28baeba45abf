"""Summary: one record as the report's tables and its JSON say it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flexattn.kernels.choose.registry import short
from flexattn.records.record import Record
from flexattn.report.numbers import (
    Importance,
    Reach,
    Reason,
    comparable,
    gain,
    importance,
    limits_of,
    reach,
    timed,
    untimed_reasons,
)
from flexattn.report.rivals import BenchResults


@dataclass(frozen=True, slots=True)
class Side:
    """The default or the winner: config, microseconds, resources; None where it is not known."""

    config: str
    us: float | None
    low: float | None
    high: float | None
    registers: int | None
    spills: int | None
    shared_memory: int | None
    error: float | None
    budget: float | None
    reach: Reach | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One problem's result. speedup, low, high: the default's time over the winner's, paired.

    speedup is None where the default has no time. torch: the best rival of the bench whose name
    starts with torch, and its time over ours. missing: sentences
    about what could not be computed. model: the first word of its title.
    """

    title: str
    problem: str
    device: str
    provenance: str
    made: str
    seconds: float
    default: Side
    winner: Side
    changed: bool
    speedup: float | None
    low: float | None
    high: float | None
    rounds: int
    p_value: float
    margin: float
    confidence: float
    why: str
    timed: int
    untimed: int
    importance: Importance
    reasons: tuple[Reason, ...]
    torch: tuple[str, float] | None
    note: str
    triton: str
    missing: tuple[str, ...]

    @property
    def model(self) -> str:
        """The workload's name, with which its titles begin."""
        return (self.title.split() or [self.title])[0]


def summarize(record: Record, benches: tuple[BenchResults, ...] = ()) -> Summary:
    """Everything the page says about a record, without the pictures."""
    decision = record.decision
    ratio, untimed, mattered = gain(record), untimed_reasons(record), importance(record)
    known = not math.isnan(ratio.value)
    return Summary(
        title=record.title or record.key.digest(),
        problem=_problem(record),
        device=record.environment.device,
        provenance=record.provenance,
        made=record.made,
        seconds=record.seconds,
        default=_side(record, decision.default),
        winner=_side(record, decision.winner),
        changed=decision.winner != decision.default,
        speedup=ratio.value if known else None,
        low=ratio.low if known else None,
        high=ratio.high if known else None,
        rounds=ratio.rounds,
        p_value=decision.p_value,
        margin=decision.margin,
        confidence=decision.confidence,
        why=decision.why,
        timed=len(timed(record)),
        untimed=sum(reason.count for reason in untimed),
        importance=mattered,
        reasons=untimed,
        torch=_best_torch(record, benches),
        note=record.note,
        triton=record.environment.triton,
        missing=tuple(_missing(record, known, mattered.note)),
    )


def _missing(record: Record, known: bool, unranked: str) -> Iterator[str]:
    """Sentences on what could not be computed, and why."""
    device, times, same = record.environment.device, timed(record), comparable(record)
    if not times:
        yield "No config has a time, so there is nothing to draw."
        return
    if not known:
        yield "The default and the winner share no round, so there is no speedup."
    if len(times) == 1:
        yield "One config was timed, so there is nothing to compare it with."
    if others := len(times) - len(same):
        which = f"{others} configs are" if others > 1 else "One config is"
        yield (
            f"{which} of another template than the winner's, which has other numbers: only the "
            "list of all configs and the roofline show them."
        )
    if unranked:
        yield unranked
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
    trial = record.trials[index]
    found = next((each for each in timed(record) if each.trial == index), None)
    built = bool(trial.registers)
    return Side(
        config=short(trial.config),
        us=found.us if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        registers=trial.registers if built else None,
        spills=trial.spills if built else None,
        shared_memory=trial.shared_memory if built else None,
        error=trial.gate.error if trial.gate else None,
        budget=trial.gate.budget if trial.gate else None,
        reach=reach(record, found.us) if found else None,
    )


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
