"""The accuracy rule: the tests' tolerance and the tuner's gate are this one function.

An error may be twice that of the reference run plus one unit in the last place of the output's
dtype, for the maximum and for the root mean square alike; rounding.py has how the reference run
rounds, of e4m3 too. Where a kernel rounds weights to e4m3 as that run does, its root mean square
error may be E4M3_SHARE times that run's, which is 2 to 3 % of the output. What no tolerance can
excuse is a fault: a wrong shape or dtype, NaN, a misplaced infinity, a fully masked row that is
not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flexattn.errors import InputError

Triple: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]

NAMES = ("out", "lse", "max_scores")
# Errors as a share of the reference run's: as a rule, and of a root mean square where both round
# weights to e4m3.
RMS_SHARE, E4M3_SHARE = 2.0, 1.1
_CHUNK = 2**22
_SAMPLES = 8


@dataclass(frozen=True)
class ErrorRow:
    """One measured error beside what it may be."""

    name: str
    error: float
    budget: float
    reference: float

    @property
    def passed(self) -> bool:
        """True if the error is within its budget; NaN is not."""
        return self.error <= self.budget

    @property
    def used(self) -> float:
        """The share of the budget that is used; infinite of NaN."""
        return self.error / self.budget if self.error == self.error and self.budget else math.inf


@dataclass(frozen=True)
class Sample:
    """One of the worst coordinates of a tensor, with the value got and the oracle's."""

    name: str
    index: tuple[int, ...]
    got: float
    oracle: float


@dataclass(frozen=True)
class Verdict:
    """The gate's verdict on one run; `faults` are failures that no budget covers."""

    rows: tuple[ErrorRow, ...]
    faults: tuple[str, ...]
    worst: tuple[Sample, ...]

    @property
    def passed(self) -> bool:
        """True if there is no fault and every error is within its budget."""
        return not self.faults and all(row.passed for row in self.rows)

    def message(self) -> str:
        """A table of error, budget and reference error, then faults and worst coordinates."""
        lines = ["passed the accuracy gate" if self.passed else "FAILED the accuracy gate"]
        if self.rows:
            lines.append(f"  {'':<16}{'error':>11}{'budget':>11}{'reference':>11}")
        for row in self.rows:
            numbers = f"{row.error:>11.3e}{row.budget:>11.3e}{row.reference:>11.3e}"
            lines.append(f"  {row.name:<16}{numbers}{'' if row.passed else '  over budget'}")
        lines += [f"  fault: {fault}" for fault in self.faults]
        if self.worst:
            lines.append("  worst coordinates:")
        for s in self.worst:
            place = ", ".join(map(str, s.index))
            lines.append(f"    {s.name}[{place}]  got {s.got:.9g}  oracle {s.oracle:.9g}")
        return "\n".join(lines)


def judge(
    got: Triple, oracle: Triple, rounded: Triple, dtype: torch.dtype, rms_share: float = RMS_SHARE
) -> Verdict:
    """Judges a run's (out, lse, max_scores) against the oracle, within the reference run's budget.

    Each triple is out [..., L, Ev], lse [..., L], max_scores [..., L]; a None in `got` is not
    judged. `dtype` is what `out` must have; lse and max_scores must be float32, float64 if `dtype`
    is. rms_share: of the reference run's root mean square error. Fully masked rows are those where
    the oracle's max_scores is -inf, which no sink changes, or its lse where it gives no
    max_scores. Raises InputError if nothing is left to judge, or if the oracle or the reference
    run lacks a tensor that is to be judged.
    """
    reached = oracle[1] if oracle[2] is None else oracle[2]
    empty = None if reached is None else (reached == -math.inf)
    checks = []
    for name, mine, exact, reference in zip(NAMES, got, oracle, rounded, strict=True):
        if mine is None:
            continue
        if exact is None or reference is None or exact.shape != reference.shape:
            raise InputError(
                f"{name} is to be judged, but the oracle's and the reference run's do not match",
                "the oracle and the reference run give every judged tensor, in one shape",
            )
        want = dtype if name == "out" or dtype == torch.float64 else torch.float32
        masked = empty if name == "out" else None
        checks.append(_Check(name, mine, exact, reference, masked, want, rms_share))
    if not checks:
        raise InputError(
            "there is no tensor to judge", "at least one of out, lse, max_scores is given"
        )
    return _verdict(checks)


def judge_named(
    got: Mapping[str, Tensor], oracle: Mapping[str, Tensor], rounded: Mapping[str, Tensor]
) -> Verdict:
    """Judges tensors by name, such as gradients, each within the budget of the reference run's.

    Each has the shape of the oracle's, and the dtype of the reference run's.
    """
    return _verdict(
        _Check(name, mine, oracle[name], rounded[name], None, rounded[name].dtype)
        for name, mine in got.items()
    )


def badness(verdict: Verdict) -> tuple[int, float]:
    """The order of verdicts, the worst last: faults, then the share of a budget that is used."""
    return len(verdict.faults), max((row.used for row in verdict.rows), default=0.0)


def _verdict(checks: Iterable[_Check]) -> Verdict:
    rows: list[ErrorRow] = []
    faults: list[str] = []
    worst: list[Sample] = []
    for check in checks:
        if wrong := _misfit(check.name, check.got, check.oracle, check.dtype):
            faults.append(wrong)
            continue
        measured, found = check.measure()
        rows += measured
        faults += found
        if found or not all(row.passed for row in measured):
            worst += check.worst()
    return Verdict(tuple(rows), tuple(faults), tuple(worst))


def _misfit(name: str, got: Tensor, oracle: Tensor, dtype: torch.dtype) -> str:
    if got.shape != oracle.shape:
        return f"{name} has shape {tuple(got.shape)}, not {tuple(oracle.shape)}"
    if got.dtype != dtype:
        return f"{name} has dtype {got.dtype}, not {dtype}"
    return ""


def _ulp(magnitude: float, dtype: torch.dtype) -> float:
    """One unit in the last place of `dtype` at `magnitude`."""
    info = torch.finfo(dtype)
    return float(info.eps * 2.0 ** math.floor(math.log2(max(magnitude, info.smallest_normal))))


@dataclass(frozen=True)
class _Check:
    """One tensor of a run beside the oracle's and the reference run's, read in chunks of rows."""

    name: str
    got: Tensor
    oracle: Tensor
    reference: Tensor
    empty: Tensor | None
    dtype: torch.dtype
    rms_share: float = RMS_SHARE

    def measure(self) -> tuple[list[ErrorRow], list[str]]:
        count = 0
        largest = squares = 0.0
        errors, references = _Errors(), _Errors()
        nans = infinities = unzeroed = 0
        for _, got, oracle, reference, empty in self._chunks():
            finite = oracle.isfinite()
            nan = got.isnan() & ~oracle.isnan()
            nans += int(nan.sum())
            alien = (~finite | ~got.isfinite()) & ~nan & ~_same(got, oracle)
            infinities += int(alien.sum())
            unzeroed += int(((got != 0) & empty).any(-1).sum())
            judged = finite & ~empty
            kept = torch.where(judged, oracle, 0.0)
            count += int(judged.sum())
            largest = max(largest, float(kept.abs().max()))
            squares += float(kept.square().sum())
            errors.add(got, oracle, judged)
            references.add(reference, oracle, judged)
        rms = math.sqrt(squares / max(count, 1))
        rows = [
            self._row("max", errors.largest, references.largest, largest),
            self._row("rms", errors.rms(count), references.rms(count), rms),
        ]
        faults = [
            f"{self.name} {what}: {number}"
            for what, number in (
                ("has NaN where the oracle has none", nans),
                ("differs where it or the oracle is not finite", infinities),
                ("is not zero in fully masked rows", unzeroed),
            )
            if number
        ]
        return rows, faults

    def worst(self) -> list[Sample]:
        """The largest errors; faults come first."""
        found: list[tuple[float, int, float, float]] = []
        for start, got, oracle, _, empty in self._chunks():
            error = torch.where(_same(got, oracle), 0.0, (got - oracle).abs())
            error = torch.where((got != 0) & empty, math.inf, error)
            error = error.nan_to_num(nan=math.inf, posinf=math.inf).flatten()
            top = error.topk(min(_SAMPLES, error.numel()))
            where = top.indices
            values = got.flatten()[where].tolist(), oracle.flatten()[where].tolist()
            places = (where + start).tolist()
            found += list(zip(top.values.tolist(), places, *values, strict=True))
            found = sorted(found, key=lambda item: (-item[0], item[1]))[:_SAMPLES]
        return [
            Sample(self.name, _index(place, self.got.shape), got_there, oracle_there)
            for error, place, got_there, oracle_there in found
            if error > 0
        ]

    def _row(self, kind: str, error: float, reference: float, magnitude: float) -> ErrorRow:
        share = self.rms_share if kind == "rms" else RMS_SHARE
        budget = share * reference + _ulp(magnitude, self.dtype)
        return ErrorRow(f"{self.name} {kind}", error, budget, reference)

    def _chunks(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """(first element, got, oracle, reference, fully masked) of some rows, in float64."""
        if self.got.numel() == 0:
            return
        width = self.got.shape[-1] if self.empty is not None else 1
        device = self.oracle.device
        flat = [x.detach().reshape(-1, width) for x in (self.got, self.oracle, self.reference)]
        empty = torch.zeros((), dtype=torch.bool, device=device).expand(flat[0].shape[0], 1)
        if self.empty is not None:
            empty = self.empty.reshape(-1, 1)
        step = max(1, _CHUNK // width)
        for row in range(0, flat[0].shape[0], step):
            rows = slice(row, row + step)
            got, oracle, reference = (x[rows].to(device).double() for x in flat)
            yield row * width, got, oracle, reference, empty[rows].expand(got.shape)


@dataclass
class _Errors:
    """Running maximum and sum of squares of an error, over lanes where both values are finite."""

    largest: float = 0.0
    squares: float = 0.0

    def add(self, value: Tensor, oracle: Tensor, judged: Tensor) -> None:
        error = torch.where(judged & value.isfinite(), (value - oracle).abs(), 0.0)
        self.largest = max(self.largest, float(error.max()))
        self.squares += float(error.square().sum())

    def rms(self, count: int) -> float:
        return math.sqrt(self.squares / max(count, 1))


def _index(place: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(each) for each in torch.unravel_index(torch.tensor(place), shape))


def _same(got: Tensor, oracle: Tensor) -> Tensor:
    return (got == oracle) | (got.isnan() & oracle.isnan())
