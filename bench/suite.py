"""Everything that needs a GPU and backs a claim, in order, within the time there is.

`bench/suite.toml` names the steps: GPU tests and benches, each with the seconds it may take. A
step that outlasts them is ended, with all that it started; the next one goes on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.command import matching
from flexattn.errors import FlexAttnError
from flexattn.tuning.tables import read_file

STEPS = Path(__file__).with_suffix(".toml")
ROOT = STEPS.parents[1]
# What a step that is told to end may take for it, before it is killed.
GRACE = 5.0
LATE = 124
# Logs are whole, processes of tests collect alike, and nobody waits for a network.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Step:
    """One command. run: its words, in which {out} is the folder of results. seconds: its limit.

    lines: how many of its last lines the summary repeats.
    """

    name: str
    run: str
    seconds: float
    lines: int = 1

    def command(self, out: Path, processes: int) -> list[str]:
        """The command's words: a bench's, or for `pytest …` that many processes of GPU tests."""
        words = shlex.split(self.run.replace("{out}", str(out)))
        if words[0] != "pytest":
            return [sys.executable, "-m", *words]
        spread = ["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []
        tests = ["-q", "-m", "gpu", "--timeout-method", "thread", "--tb", "short"]
        return [sys.executable, "-m", "pytest", *tests, *spread, *words[1:]]


@dataclass(frozen=True)
class Outcome:
    """The end of a step. status: of its process; 124 where its time ended it."""

    step: Step
    status: int
    seconds: float
    tail: tuple[str, ...]

    def __str__(self) -> str:
        word = {0: "ok", LATE: "LATE"}.get(self.status, f"FAIL {self.status}")
        head = f"{word:8} {self.step.name}, {self.seconds:.0f} of {self.step.seconds:.0f} s"
        return "\n".join([head, *(f"    {line}" for line in self.tail)])


def read_steps(path: Path = STEPS) -> list[Step]:
    """The steps of a file, in its order."""
    return [Step(name, **given) for name, given in read_file(path).items()]


def run_step(step: Step, out: Path, processes: int) -> Outcome:
    """Run a step; what it prints goes to {out}/NAME.log, and the last lines into the outcome."""
    log = out / f"{step.name}.log"
    begin = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            step.command(out, processes),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        try:
            status = child.wait(step.seconds)
        except subprocess.TimeoutExpired:
            status = LATE
        finally:
            _end(child)
    tail = log.read_text(errors="replace").splitlines()[-step.lines :]
    return Outcome(step, status, time.monotonic() - begin, tuple(tail))


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step's whole group: workers of a step that ended by itself must not hold the GPU."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def suite(
    steps: Sequence[Step], out: Path, seconds: float, processes: int
) -> Iterator[Outcome | Step]:
    """The outcomes of steps in their order, or a step itself where the time left is too short."""
    end = time.monotonic() + seconds
    for step in steps:
        if time.monotonic() + step.seconds > end:
            yield step
        else:
            yield run_step(step, out, processes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; the status is 0, 1 if a step failed or was late, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m bench.suite", description=__doc__)
    parser.add_argument("--steps", default="", help="regular expression: the names of the steps")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all; default: an hour")
    parser.add_argument("--processes", type=int, default=8, help="of GPU tests; default: 8")
    parser.add_argument("--out", type=Path, default=Path("suite-out"), help="folder of results")
    parser.add_argument("--list", action="store_true", help="list the steps and stop")
    args = parser.parse_args(argv)
    try:
        chosen = matching(read_steps(), args.steps, "--steps", "step", lambda step: step.name)
    except FlexAttnError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        for step in chosen:
            print(f"{step.seconds:5.0f} s  {step.name}: {step.run}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for each in suite(chosen, args.out.resolve(), args.seconds, args.processes):
        if isinstance(each, Step):
            print(f"not run  {each.name}: its {each.seconds:.0f} s are not left", flush=True)
        else:
            print(each, flush=True)
            outcomes.append(each)
    return 1 if any(each.status for each in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
