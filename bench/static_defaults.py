"""`python -m bench.static_defaults`: where the static default stands in every record and study.

Of each it shows the best time over that of today's default, among the configs that it has times
of; a default that it has none of is counted, and shows nothing. With --fields it shows what each
field of a config wins: the least time of all configs that have the default's value of it, over
the best time. That is at most what a search wins by the field. Needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

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


def won_by_fields(found: Measured) -> dict[tuple[str, str], float]:
    """The most that a search wins by each field, by the config's class and the field's name.

    Only of the class of today's default, and of fields with times of the default's value and of
    others.
    """
    config = default(found.problem, found.device)
    times = {each: us for each, us in found.times.items() if type(each) is type(config)}
    won = {}
    for name in (each.name for each in fields(config)):
        kept = [us for each, us in times.items() if getattr(each, name) == getattr(config, name)]
        if kept and len(kept) < len(times):
            won[type(config).__name__, name] = min(kept) / min(times.values())
    return won


def table_of_fields(every: Iterable[dict[tuple[str, str], float]]) -> str:
    """A line a field that has times of several values, those that win most first."""
    rows = defaultdict(list)
    for won in every:
        for key, gain in won.items():
            rows[key].append(gain)
    lines = [
        "| config | field | records | 1 % or more | 2 % or more | most |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, name), gains in sorted(rows.items(), key=lambda row: (row[0][0], -max(row[1]))):
        one, two = (sum(gain >= 1 + least for gain in gains) for least in (0.01, 0.02))
        most = f"{100 * (max(gains) - 1):.1f} %"
        lines.append(f"| `{kind}` | `{name}` | {len(gains)} | {one} | {two} | {most} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.static_defaults", description=__doc__)
    parser.add_argument("--fields", action="store_true", help="what each field of a config wins")
    if parser.parse_args(argv).fields:
        print(table_of_fields(map(won_by_fields, measured())))
    else:
        print(table([standing(each) for each in measured()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
