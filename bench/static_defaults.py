"""`python -m bench.static_defaults`: where the static default stands in every record and study.

Of each it shows the best time over that of today's default, among the configs that it has times
of; a default that it has none of is counted, and shows nothing. Needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.measured import Measured, measured
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.choose.registry import short

BAR = 0.92


@dataclass(frozen=True)
class Standing:
    """The default of a record's problem. ratio: best time over its own; None without a time."""

    kind: str
    title: str
    triton: str
    configs: int
    default: str
    best: str
    best_us: float
    ratio: float | None


def standing(found: Measured) -> Standing:
    """The place of today's default among the times of a record."""
    problem, device = found.problem, found.device
    config = default(problem, device)
    own, best = found.time(config), min(found.times, key=lambda each: found.times[each])
    us = found.times[best]
    ratio = None if own is None else round(us / own, 4)
    return Standing(
        found.kind, found.title, found.triton, len(found.times), short(config), short(best),
        round(us, 2), ratio,
    )  # fmt: skip


def table(every: Sequence[Standing]) -> str:
    """A line a kind, then each record below the bar."""
    lines = [
        "| kind | records | mean | least | below 0.92 | no time |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(each.kind for each in every):
        ours = [each for each in every if each.kind == kind]
        ratios = [each.ratio for each in ours if each.ratio is not None]
        missing = len(ours) - len(ratios)
        cells = "- | - | -"
        if ratios:
            below = sum(ratio < BAR for ratio in ratios)
            cells = f"{statistics.geometric_mean(ratios):.4f} | {min(ratios):.3f} | {below}"
        lines.append(f"| {kind} | {len(ours)} | {cells} | {missing} |")
    return "\n".join([*lines, *_below(every)])


def _below(every: Iterable[Standing]) -> Iterable[str]:
    low = [each for each in every if each.ratio is not None and each.ratio < BAR]
    for each in sorted(low, key=lambda each: each.ratio or 0.0):
        yield (
            f"  {each.ratio:.3f} {each.kind} {each.title} [{each.triton}], {each.best_us:.1f} us: "
            f"{each.default}, best {each.best} of {each.configs}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.static_defaults", description=__doc__)
    parser.parse_args(argv)
    print(table([standing(each) for each in measured()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
