"""`python -m bench.fit_costs`: costs that models of static defaults rest on, from measurements.

Each model is fitted to records and studies, then judged on what it was not fitted to: on each
record after a fit without it, and on all records of a workload after a fit without these.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.measured import Measured, measured, tiles_of
from bench.short_prompts import short_prompts
from flexattn.device import Device
from flexattn.kernels.base.estimate import ESTIMATE_MARGIN, Estimate, best_first
from flexattn.kernels.choose.defaults import reasons
from flexattn.kernels.choose.registry import short
from flexattn.kernels.hopper import cost as hopper, space
from flexattn.kernels.triton import cost as triton, defaults
from flexattn.problem import Problem

# In a fit, what a config counts that the model does not choose among.
ASIDE = 0.2


@dataclass(frozen=True)
class Model:
    """A family's model: its costs, what they expect, the rules' configs, and what it may choose.

    configs: the name of the class that it is fitted to. studies: whether studies are among what is
    fitted; those of prefill were made with templates of older days. margin: what another config
    must be expected to gain.
    """

    kind: str
    configs: str
    costs: Any
    expected: Callable[..., Estimate | None]
    rules: Callable[[Problem, Device], Iterable[Any]]
    alternatives: Callable[[Problem, Any, Device], Iterable[Any]]
    studies: bool
    margin: Callable[[Problem], float] = lambda problem: ESTIMATE_MARGIN


MODELS = {
    "hopper": Model(
        "prefill", "HopperPrefillConfig", hopper.COSTS, hopper.expected,
        lambda problem, device: space.preferences(problem.structure),
        lambda problem, first, device: space.alternatives(
            problem, list(space.preferences(problem.structure))
        ), False,
    ),
    "triton": Model(
        "prefill", "PrefillConfig", triton.PREFILL_COSTS, triton.expected_prefill,
        defaults.prefill_rules,
        lambda problem, first, device: triton.other_tiles(first), False, triton.margin,
    ),
    "decode": Model(
        "decode", "DecodeConfig", triton.DECODE_COSTS, triton.expected_decode,
        defaults.decode_rules, triton.other_splits, True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A record's times of a model's configs, and the first that the rules have for its problem.

    choices: of the timed ones the first and its alternatives, however they are compiled.
    """

    of: Measured
    first: Any
    choices: frozenset[Any]

    @property
    def title(self) -> str:
        """Of the record."""
        return self.of.title

    @property
    def workload(self) -> str:
        """The preset, or the study: rows of one have heads and lengths in common."""
        return self.title.split()[0]


def rows_of(model: Model, found: Sequence[Measured]) -> list[Row]:
    """The records that a model is fitted to and judged by."""
    rows = []
    for each in found:
        problem = each.problem
        study = "studies" in each.path.parts
        if each.kind != model.kind or (study and not model.studies):
            continue
        assert isinstance(problem, Problem)
        times = {
            config: us for config, us in each.times.items()
            if type(config).__name__ == model.configs
            and model.expected(problem, config, each.device, model.costs) is not None
        }  # fmt: skip
        if not times:
            continue
        able = (
            config
            for config in model.rules(problem, each.device)
            if not reasons(config, problem.structure, each.device)
        )
        first = next(able)
        among = {tiles_of(c) for c in (first, *model.alternatives(problem, first, each.device))}
        choices = frozenset(config for config in times if tiles_of(config) in among)
        rows.append(Row(replace(each, times=times), first, choices))
    return rows


def loss(model: Model, costs: Any, rows: Iterable[Row]) -> float:
    """The error of ratios within a record, and a tenth of that of times (Huber)."""
    total = 0.0
    for row in rows:
        errors = _errors(model, costs, row)
        weights = sum(weight for _, weight in errors)
        middle = sum(error * weight for error, weight in errors) / weights
        total += sum(weight * _huber(e - middle) for e, weight in errors) / weights
        total += 0.1 * _huber(middle)
    return total


def fitted(model: Model, costs: Any, rows: Sequence[Row], step: float = 0.3) -> Any:
    """Costs after a search along each of them in turn, by factors that shrink."""
    best = loss(model, costs, rows)
    while step > 0.02:
        before = best
        for name, value in asdict(costs).items():
            for factor in (math.exp(step), math.exp(-step)):
                other = replace(costs, **{name: float(f"{value * factor:.3g}")})
                found = loss(model, other, rows)
                if found < best:
                    best, costs = found, other
                    break
        if best > before * (1 - 1e-3):
            step /= 2
    return costs


def judged(model: Model, costs: Any, row: Row) -> tuple[float, float, Any]:
    """Best time over that of the rules' first config and of the model's, and which that is.

    Both NaN where the record has no time of the first. The model chooses among what has one.
    """
    problem, device, time = row.of.problem, row.of.device, row.of.time
    rules = time(row.first)
    if rules is None:
        return math.nan, math.nan, row.first
    others = model.alternatives(problem, row.first, device)  # type: ignore[arg-type]
    chosen = next(
        best_first(
            [row.first],
            [each for each in others if time(each) is not None],
            lambda config: model.expected(problem, config, device, costs),
            margin=model.margin(problem),  # type: ignore[arg-type]
        )
    )
    best = min(row.of.times.values())
    return best / rules, best / (time(chosen) or rules), chosen


def _errors(model: Model, costs: Any, row: Row) -> list[tuple[float, float]]:
    """Logarithms of expected over measured, each with its weight."""
    found = []
    for config, us in row.of.times.items():
        told = model.expected(row.of.problem, config, row.of.device, costs)
        assert told is not None
        found.append((math.log(told.us / us), 1.0 if config in row.choices else ASIDE))
    return found


def _huber(error: float, edge: float = 0.1) -> float:
    size = abs(error)
    return size * size / 2 if size < edge else edge * (size - edge / 2)


def _told(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    kept = [pair for pair in pairs if not math.isnan(pair[0])]
    cells = []
    for index in (0, 1):
        values = [pair[index] for pair in kept]
        below = sum(value < 0.92 for value in values)
        mean = statistics.geometric_mean(values)
        cells.append(f"{mean:.4f} | {min(values):.3f} | {below}")
    return f"| {name} | {len(kept)} | " + " | ".join(cells) + " |"


def _off(model: Model, costs: Any, rows: Sequence[Row]) -> str:
    """The errors of the model's times and ratios, in words."""
    times, ratios = [], []
    for row in rows:
        errors = _errors(model, costs, row)
        middle = statistics.median(error for error, _ in errors)
        times.append(abs(middle))
        ratios += [abs(error - middle) for error, weight in errors if weight == 1]
    return (
        f"in the median of {len(rows)} records times are off by {statistics.median(times):.1%}, "
        f"ratios of what it chooses among by {statistics.median(ratios):.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fit and judge; prints costs to be written into the family's module, and the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit_costs", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--check", action="store_true", help="judge the costs as they are")
    asked = parser.parse_args(argv)
    found = [*measured(), *short_prompts()]
    for name in asked.models:
        model = MODELS[name]
        rows = rows_of(model, found)
        costs = model.costs if asked.check else fitted(model, model.costs, rows)
        print(f"\n{name}: {costs}\n{_off(model, costs, rows)}")
        print("| held out | records | rules: mean | worst | < 0.92 | model: mean | worst | < 0.92")
        print("|---|---|---|---|---|---|---|---")
        print(_told("nothing", [judged(model, costs, row)[:2] for row in rows]))
        for part in () if asked.check else ("workload", "title"):
            pairs = []
            for held in sorted({getattr(row, part) for row in rows}):
                rest = [row for row in rows if getattr(row, part) != held]
                again = fitted(model, costs, rest, 0.1 if part == "workload" else 0.04)
                ours = (row for row in rows if getattr(row, part) == held)
                pairs += [judged(model, again, row)[:2] for row in ours]
            print(_told(part, pairs))
        for row in rows:
            rules, chosen, config = judged(model, costs, row)
            if config != row.first or rules < 0.92:
                where = f"{row.title} [{row.of.triton}]"
                what = f"{short(row.first)} -> {short(config)}"
                print(f"  {rules:.3f} -> {chosen:.3f} {where}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
