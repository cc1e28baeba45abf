"""`python -m bench.trees OLD NEW`: two checkouts of flexattn raced row by row on one GPU.

Each checkout runs in a process of its own, by its public names alone, as a user would run it.
Rounds alternate between them, in an order that alternates too. A row whose results are wrong on
one side has no times. The table gives the old time over the new: above 1, NEW is faster. With
--out FILE.json the rows that it has already are not run again. With --python each side has an
interpreter of its own: `--python A/bin/python B/bin/python HERE HERE` races two releases of Triton
on one checkout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.results import Gate, Report, RowResult, load, save
from bench.trees_rows import RaceRow, race_rows, shrunk
from flexattn.measure.timing import Ratio, Samples, paired_ratio

BENCH = Path(__file__).resolve().parent
SIDES = ("old", "new")
MILLISECONDS = 8.0
MOST_CALLS = 200
# Of a host's burst: below the launches that a driver queues, so that no call waits for the GPU.
HOST_CALLS = 100
# Rounds of a fresh process each.
PROCESSES = 6


class Checkout:
    """A process of one checkout, which answers lines of JSON; where it has ended, another one."""

    def __init__(self, root: Path, cache: Path, device: str, python: str) -> None:
        self._root, self._cache = root.resolve(), cache
        self._command = [python, "-P", "-m", "bench.trees_child", device]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        # This bench serves both checkouts: neither side's own one is found before it.
        ours = self._cache / "ours"
        if not ours.exists():
            ours.mkdir(parents=True)
            (ours / "bench").symlink_to(BENCH)
        environment = os.environ | {
            "PYTHONPATH": f"{ours}:{self._root}",
            "FLEXATTN_CACHE_DIR": str(self._cache / "flexattn"),
            "TRITON_CACHE_DIR": str(self._cache / "triton"),
        }  # fmt: skip
        return subprocess.Popen(
            self._command, cwd=self._root, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def send(self, **message: Any) -> None:
        """Send a line, to a new process where the last one has ended."""
        if self._process.poll() is not None:
            self._process = self._started()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer is an error then
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; that of a process that ended is an error."""
        assert self._process.stdout is not None
        if text := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(text)
            return found
        return {"error": f"the process ended with status {self._process.wait()}"}

    def us(self, calls: int) -> float:
        """Mean microseconds of a call. Raises RuntimeError where there is none."""
        self.send(calls=calls)
        found = self.answer()
        if "error" in found:
            raise RuntimeError(found["error"])
        return float(found["us"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def race(row: RaceRow, sides: dict[str, Checkout], rounds: int) -> RowResult:
    """One row of both checkouts; a wrong result or an error leaves it without times."""
    for side in sides.values():
        side.send(row=asdict(row))  # both compile at once
    built = {label: side.answer() for label, side in sides.items()}
    gates = {k: Gate(not v["wrong"], v["wrong"]) for k, v in built.items() if "wrong" in v}
    refused = {k: v["error"] for k, v in built.items() if "error" in v}
    refused |= {k: f"wrong: {gate.message}" for k, gate in gates.items() if not gate.passed}
    first: dict[str, float] = {}
    samples: dict[str, Samples] = {}
    for label, side in () if refused else sides.items():
        try:
            first[label] = side.us(1)
        except RuntimeError as error:
            refused[label] = str(error)
    if not refused:
        try:
            samples = _timed(row, sides, rounds, first["old"])
        except RuntimeError as error:
            refused["timing"] = str(error)
    group = row.name.split("/")[0]
    return RowResult(row.name, group, 0.0, 0, gates, samples, refused)


def _timed(
    row: RaceRow, sides: dict[str, Checkout], rounds: int, estimate: float
) -> dict[str, Samples]:
    """Samples of both sides; estimate: microseconds of a call of the old one, roughly."""
    calls, enough = HOST_CALLS, MILLISECONDS * 1e3
    if row.clock == "process":
        calls, rounds = 1, min(rounds, PROCESSES)
    elif row.clock != "host":
        estimate = estimate if estimate > enough else sides["old"].us(10)
        calls = min(max(math.ceil(enough / estimate), 1), MOST_CALLS)
    us: dict[str, list[float]] = {label: [] for label in sides}
    for turn in range(rounds):
        for label in SIDES if turn % 2 else SIDES[::-1]:
            us[label].append(sides[label].us(calls))
    return {label: Samples(tuple(found), calls=calls) for label, found in us.items()}


def line(row: RowResult) -> str:
    """A row of the table."""
    if row.refused:
        return f"| {row.name} | " + "; ".join(f"{k}: {v}" for k, v in row.refused.items()) + " |"
    ratio = paired_ratio(row.samples["old"], row.samples["new"])
    old, new = (row.samples[label] for label in SIDES)
    return (
        f"| {row.name} | {old.median:.1f} | {new.median:.1f} |"
        f" {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] |"
    )


def summary(rows: Iterable[RowResult]) -> str:
    """Geometric mean and least ratio of each group and of all rows, and rows without times."""
    found: dict[str, dict[str, Ratio]] = {}
    untimed = [row.name for row in rows if not row.samples]
    for row in rows:
        if row.samples:
            ratio = paired_ratio(row.samples["old"], row.samples["new"])
            for group in (row.group, "all"):
                found.setdefault(group, {})[row.name] = ratio
    lines = ["| group | rows | geometric mean | least |", "| --- | ---: | ---: | --- |"]
    for group, ratios in found.items():
        mean = math.exp(sum(math.log(each.value) for each in ratios.values()) / len(ratios))
        name, least = min(ratios.items(), key=lambda each: each[1].value)
        lines.append(f"| {group} | {len(ratios)} | {mean:.3f} | {least.value:.3f} {name} |")
    return "\n".join([*lines, *(f"no times: {name}" for name in untimed)])


def begun(out: Path | None, report: Report) -> Report:
    """The report of an earlier run that --out names, without the rows that have no times.

    Raises ValueError where that run raced other code, or on another device.
    """
    if out is None or not out.exists():
        return report
    earlier = load(out)
    if (earlier.method, earlier.environments) != (report.method, report.environments):
        raise ValueError(f"{out} has another race: {earlier.method}, {earlier.environments}")
    rows = tuple(row for row in earlier.rows if row.samples)
    return Report(report.bench, report.method, report.environments, rows)


def _environment(sides: dict[str, Checkout]) -> dict[str, str]:
    """The device, the versions, and the code of each side; of a version that differs, both."""
    found: dict[str, str] = {}
    for label, side in sides.items():
        side.send(about=True)
        facts = side.answer()
        if "error" in facts:
            raise ValueError(f"{label}: {facts['error']}")
        found[label] = facts.pop("code")
        found |= {
            key: value if found.get(key, value) == value else f"{found[key]} and {value}"
            for key, value in facts.items()
        }
    return found


def _run(
    args: argparse.Namespace, rows: list[RaceRow], sides: dict[str, Checkout],
    show: Callable[[str], None],
) -> Report:  # fmt: skip
    method = {"rounds": args.rounds, "min_ms": MILLISECONDS, "shrink": args.shrink}
    report = begun(args.out, Report("trees", method, (_environment(sides),), ()))
    have = {row.name for row in report.rows}
    for row in rows:
        if row.name in have:
            continue
        found = race(shrunk(row, args.shrink), sides, args.rounds)
        report = Report("trees", method, report.environments, (*report.rows, found))
        show(line(found))
        if args.out:
            save(report, args.out)
    return report


def main(argv: list[str] | None = None) -> int:
    """The command line; the status is 1 where a row has no times."""
    parser = argparse.ArgumentParser(prog="python -m bench.trees", description=__doc__)
    parser.add_argument("old", type=Path, nargs="?", help="the root of a checkout")
    parser.add_argument("new", type=Path, nargs="?", help="the root of another")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="REGEX", help="of group/row")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--rounds", type=int, default=16, help="samples of each side")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every sample; resumes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--python", nargs=2, default=[sys.executable] * 2, metavar=("OLD", "NEW"),
        help="the interpreters of both sides",
    )  # fmt: skip
    parser.add_argument("--shrink", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    rows = [
        row for name, row in race_rows().items()
        if any(re.search(pattern, name) for pattern in args.rows)
    ]  # fmt: skip
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not (args.old and args.new):
        parser.error("two checkouts are raced: OLD NEW")

    def show(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        sides = {
            label: Checkout(root, Path(folder) / label, args.device, python)
            for label, root, python in zip(SIDES, (args.old, args.new), args.python, strict=True)
        }
        try:
            report = _run(args, rows, sides, show)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            for side in sides.values():
                side.close()
    print(summary(report.rows))
    return int(any(not row.samples for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
