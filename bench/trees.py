"""`python -m bench.trees OLD NEW`: two checkouts of flexattn raced row by row on one GPU.

Each checkout runs in a process of its own, as a user would run it; rounds alternate between them,
in an order that alternates too. The table gives the old time over the new: above 1, NEW is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.environment import clocks, describe
from bench.host import ROWS as HOST_ROWS
from bench.results import Gate, Report, RowResult, save
from bench.rows import decode_rows, mods_rows, prefill_rows
from bench.serving_rows import serving_rows
from flexattn.measure.timing import Ratio, Samples, paired_ratio

CHILD = Path(__file__).with_name("trees_child.py")
BENCHES: dict[str, Callable[[], Any]] = {
    "prefill": prefill_rows, "mods": mods_rows, "decode": decode_rows, "serving": serving_rows,
    "host": lambda: HOST_ROWS,
}  # fmt: skip
MILLISECONDS = 8.0
MOST_CALLS = 200


class Checkout:
    """A process of one checkout, asked by lines of JSON; where it has ended, another one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        root = self._root
        environment = os.environ | {"PYTHONPATH": f"{root.resolve()}:{os.environ['PYTHONPATH']}"}
        return subprocess.Popen(
            [sys.executable, "-P", str(CHILD.resolve())], cwd=root, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def prepare(self, bench: str, row: str) -> None:
        """Send the line that prepares a row."""
        if self._process.poll() is not None:
            self._process = self._started()
        self.tell(bench=bench, row=row)

    def tell(self, **asked: Any) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer is an error then
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; one that ended has an error."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        self._process.wait()
        return {"error": "the process ended"}

    def us(self, calls: int) -> float:
        """Mean microseconds of a call. Raises RuntimeError where there is none."""
        self.tell(calls=calls)
        found = self.answer()
        if "error" in found:
            raise RuntimeError(found["error"])
        return float(found["us"])


def race(bench: str, name: str, sides: dict[str, Checkout], rounds: int) -> RowResult:
    """One row of both checkouts; a red gate or an error leaves it without times."""
    for side in sides.values():
        side.prepare(bench, name)  # both compile at once
    prepared = {label: side.answer() for label, side in sides.items()}
    gates = {k: Gate(v["passed"], v["message"]) for k, v in prepared.items() if "passed" in v}
    refused = {k: v["error"] for k, v in prepared.items() if "error" in v}
    refused |= {k: "the accuracy gate is red" for k, gate in gates.items() if not gate.passed}
    us: dict[str, list[float]] = {}
    calls = 0
    if not refused:
        try:
            calls, us = _timed(bench, sides, rounds)
        except RuntimeError as error:
            refused["timing"] = str(error)
    samples = {label: Samples(tuple(found), calls=calls) for label, found in us.items() if found}
    return RowResult(f"{bench}/{name}", bench, 0.0, 0, gates, samples, refused, clocks=clocks())


def _timed(
    bench: str, sides: dict[str, Checkout], rounds: int
) -> tuple[int, dict[str, list[float]]]:
    """Calls of a sample, and microseconds per call of each sample of both."""
    calls = MOST_CALLS
    if bench != "host":
        calls = min(max(math.ceil(MILLISECONDS * 1e3 / sides["old"].us(10)), 1), MOST_CALLS)
    us: dict[str, list[float]] = {label: [] for label in sides}
    for turn in range(rounds):
        for label in ("old", "new") if turn % 2 else ("new", "old"):
            us[label].append(sides[label].us(calls))
    return calls, us


def asked_rows(patterns: list[str]) -> Iterator[tuple[str, str]]:
    """Rows whose bench/name one of the patterns matches."""
    for bench, rows in BENCHES.items():
        for row in rows():
            if any(re.search(pattern, f"{bench}/{row.name}") for pattern in patterns):
                yield bench, row.name


def line(row: RowResult) -> str:
    """A row of the table."""
    if row.refused:
        return f"| {row.name} | " + "; ".join(f"{k}: {v}" for k, v in row.refused.items()) + " |"
    ratio = paired_ratio(row.samples["old"], row.samples["new"])
    old, new = (row.samples[label] for label in ("old", "new"))
    return (
        f"| {row.name} | {old.median:.1f} | {new.median:.1f} |"
        f" {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] |"
    )


def summary(rows: tuple[RowResult, ...]) -> str:
    """Geometric mean and least ratio of each bench."""
    found: dict[str, list[Ratio]] = {}
    for row in rows:
        if row.samples:
            ratio = paired_ratio(row.samples["old"], row.samples["new"])
            found.setdefault(row.group, []).append(ratio)
    lines = []
    for bench, ratios in found.items():
        mean = math.exp(sum(math.log(ratio.value) for ratio in ratios) / len(ratios))
        least = min(ratio.value for ratio in ratios)
        lines.append(f"{bench}: geometric mean {mean:.3f}, least {least:.3f}, {len(ratios)} rows")
    return "\n".join(lines)


def main() -> int:
    """The command line; the status is 1 where a row has no times."""
    parser = argparse.ArgumentParser(prog="python -m bench.trees", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="REGEX", help="of bench/name")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", "")
    sides = {"old": Checkout(asked.old), "new": Checkout(asked.new)}
    method = {"rounds": asked.rounds, "min_ms": MILLISECONDS, "old": asked.old.name}
    report = Report("trees", method, (describe(),), ())
    for bench, name in asked_rows(asked.rows):
        row = race(bench, name, sides, asked.rounds)
        report = Report("trees", method, report.environments, (*report.rows, row))
        print(line(row), flush=True)
        if asked.out:
            save(report, asked.out)
    print(summary(report.rows))
    return int(any(row.refused for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
