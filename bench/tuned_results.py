"""What `bench.tuned` finds of a row, how two tunings disagree, and the promises in numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.environment import describe
from bench.results import write
from bench.rows import Row
from flexattn.kernels.base.config import Config, describe as said
from flexattn.measure.timing import Samples, paired_ratio
from flexattn.records.record import Record
from flexattn.tune.trial_table import cost

__all__ = [
    "TORCH",
    "Result",
    "flip",
    "flipped",
    "made",
    "percent",
    "regret",
    "save",
    "summary",
    "table",
]

# Winners of two tunings that differ by less than this are one answer.
FLIP = 0.03
# One kernel raced with itself, called in two ways, reads up to 0.3 % apart.
NOISE = 0.01
TORCH = "torch-flex-tuned"


@dataclass(frozen=True)
class Result:
    """One row. *_us: medians of one interleaved race; 0 for who was not timed.

    gain: default over tuned, torch_ratio: torch over tuned, both as medians of paired rounds.
    slower: whether even the interval of the gain lies more than NOISE below 1.
    flip: as the function of this name.
    seconds: of each tuning without its builds.
    """

    name: str
    kind: str
    config: str
    default_us: float
    tuned_us: float
    torch_us: float
    gain: float
    torch_ratio: float
    slower: bool
    flip: float | None
    seconds: tuple[float, ...]
    why: str
    samples: dict[str, tuple[float, ...]]
    refused: dict[str, str]


def regret(config: Config, record: Record) -> float | None:
    """How much slower than a record's winner a config was there: 0.03 is 3 %.

    None where the record did not time it. Times compare through the default of the same rounds;
    what was not sure enough to win may be faster by a little, which counts as 0.
    """
    trials, default = record.trials, record.decision.default
    index = next((i for i, trial in enumerate(trials) if trial.config == config), None)
    if index is None:
        return None
    own, best = cost(trials, index, default), cost(trials, record.decision.winner, default)
    if not (math.isfinite(own) and math.isfinite(best)):
        return None
    return round(max(0.0, own / best - 1), 4)


def flip(one: Record, other: Record) -> float | None:
    """How far two tunings of a problem disagree: the regret of a winner in the other's samples.

    0 where they agree; None where neither timed the other's winner, and nobody can tell.
    """
    if one.config == other.config:
        return 0.0
    found = [regret(one.config, other), regret(other.config, one)]
    return max((each for each in found if each is not None), default=None)


def flipped(flip: float | None) -> bool:
    """Whether two tunings gave two answers; they did where nobody can tell."""
    return flip is None or flip > FLIP


def made(
    row: Row,
    records: Sequence[Record],
    seconds: Sequence[float],
    samples: Mapping[str, Samples],
    refused: Mapping[str, str],
) -> Result:
    """The result of a row's tunings and of its race, in which "default" and "tuned" ran."""
    first = records[0]
    us = {name: each.median if each.us else 0.0 for name, each in samples.items()}
    failed = {name: str(each.failure) for name, each in samples.items() if each.failure}

    def ratio(name: str) -> float:
        if not us.get(name) or not us["tuned"]:
            return 0.0
        return paired_ratio(samples[name], samples["tuned"]).value

    return Result(
        row.name,
        first.key.kind,
        said(first.config),
        us["default"],
        us["tuned"],
        us.get(TORCH, 0.0),
        ratio("default"),
        ratio(TORCH),
        paired_ratio(samples["default"], samples["tuned"]).high < 1 - NOISE,
        _worst([flip(first, other) for other in records[1:]]),
        tuple(seconds),
        first.decision.why,
        {name: each.us for name, each in samples.items()},
        {**refused, **failed},
    )


def _worst(flips: Sequence[float | None]) -> float | None:
    known = [each for each in flips if each is not None]
    return None if len(known) < len(flips) else max(known, default=0.0)


def _geometric(values: Iterable[float]) -> float:
    found = [value for value in values if value]
    return math.exp(statistics.fmean(map(math.log, found))) if found else 0.0


def summary(results: Sequence[Result]) -> dict[str, float]:
    """The promises in numbers. Torch's are of decode, the rows in which it was timed."""
    found: dict[str, float] = {"rows": len(results)}
    for kind in ("decode", "prefill"):
        of = [r for r in results if r.kind == kind]
        if of:
            found |= {
                f"{kind}: rows": len(of),
                f"{kind}: gain over the default": _geometric(r.gain for r in of),
                f"{kind}: least gain": min((r.gain for r in of if r.gain), default=0.0),
                f"{kind}: slower beyond noise": sum(r.slower for r in of),
            }
    against = [r for r in results if r.torch_ratio]
    return found | {
        "rows with torch": len(against),
        "over torch's tuned flex": _geometric(r.torch_ratio for r in against),
        "flip rate": sum(flipped(r.flip) for r in results) / max(1, len(results)),
        "longest tuning in s": max((s for r in results for s in r.seconds), default=0.0),
    }


def percent(flip: float | None) -> str:
    """A flip as people read it."""
    return "unknown" if flip is None else f"{100 * flip:.1f} %"


def table(results: Sequence[Result]) -> str:
    """The rows as markdown, and the summary below them."""
    lines = [
        "| row | default µs | tuned µs | gain | torch µs | torch / tuned | flip | tuning s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        seconds = ", ".join(f"{s:.1f}" for s in r.seconds)
        torch = f"{r.torch_us:.1f} | {r.torch_ratio:.2f}" if r.torch_ratio else "- | -"
        lines.append(
            f"| {r.name} | {r.default_us:.1f} | {r.tuned_us:.1f} | {r.gain:.3f} | "
            f"{torch} | {percent(r.flip)} | {seconds} |"
        )
    lines += ["", *(f"{name}: {value:.3f}" for name, value in summary(results).items())]
    return "\n".join(lines)


def save(path: Path, method: Mapping[str, object], results: Sequence[Result]) -> None:
    """Write what is there so far."""
    data = {
        "bench": "tuned",
        "method": dict(method),
        "environment": describe(),
        "summary": summary(results),
        "rows": [asdict(each) for each in results],
    }
    write(data, path)
