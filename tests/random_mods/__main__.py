"""python -m tests.random_mods: random mods, compiled for an H200, run, or made into block masks.

compile: 2,000 with no GPU. check: 500 on a GPU, or with FLEXATTN_INTERPRET=1 1,000 in Triton's
interpreter, against torch's eager flex_attention in float64. masks: the BlockMasks of 5,000, on
the CPU, against those of the dense masks; with FLEXATTN_INTERPRET=1 a tenth by the kernel too.
changes: 300, whose captures change between calls, held to what they capture now, on the CPU;
a third compute with captured numbers at length, by Python's rules.
compiled-changes: 200 of these under torch.compile.
gradients: of 300 in all that they capture, as check runs, against autograd's in float64.
e4m3: 300 as check runs, with q, k and v of e4m3, on a Hopper GPU.
selections: 500 random Selections beside mods and sinks, results and gradients, as check runs.
battery: what a release of Triton is held to: the catalogue forward, backward, in decode and by a
DecodePlan, and 500 mods rich in // and %, each in one of these. A line a part; --out has the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flexattn.kernels.ptx.assembler import triton_version
from flexattn.settings import compiler_environment, current, worker_environment
from flexattn.tuning.builds import Pool, default_jobs
from tests.random_mods.battery import CATALOGUE, battery, parts
from tests.random_mods.changes import changed
from tests.random_mods.checking import checked, checked_e4m3
from tests.random_mods.compiled_changes import changed as compiled_changed
from tests.random_mods.compiling import compiled
from tests.random_mods.gradients import checked_gradients
from tests.random_mods.masks import checked_mask
from tests.random_mods.outcomes import Outcome, Task, outcomes, table, write
from tests.random_mods.selections import checked_selection

COUNTS = {
    "compile": 2000, "check": 500, "masks": 5000, "changes": 300, "compiled-changes": 200,
    "gradients": 300, "e4m3": 300, "selections": 500, "battery": len(CATALOGUE) + 500,
}  # fmt: skip
INTERPRETED = 1000
# Of L and S where it runs; SHORT in the interpreter, which takes a second for a call.
LONGEST = {
    "compile": 0, "check": 400, "masks": 200, "changes": 0, "compiled-changes": 0, "gradients": 61,
    "e4m3": 400, "selections": 300, "battery": 301,
}  # fmt: skip
SHORT = 101


def op_alone() -> dict[str, str]:
    """An environment in which Inductor's own kernel of the CPU takes no call from ours."""
    return worker_environment(0) | {"ATEN_CPU_CAPABILITY": "default"}


RUNS: dict[str, tuple[Callable[[Task], Outcome], Callable[[], dict[str, str]]]] = {
    "compile": (compiled, compiler_environment),
    "check": (checked, partial(worker_environment, 0)),
    "masks": (checked_mask, partial(worker_environment, 0)),
    "changes": (changed, compiler_environment),
    "compiled-changes": (compiled_changed, op_alone),
    "gradients": (checked_gradients, partial(worker_environment, 0)),
    "e4m3": (checked_e4m3, partial(worker_environment, 0)),
    "selections": (checked_selection, partial(worker_environment, 0)),
    "battery": (battery, partial(worker_environment, 0)),
}


def main() -> int:
    """Exit status 1 where a mod was not served, or not rightly."""
    asked = parsed()
    start = asked.start if asked.only is None else asked.only
    count = asked.count if asked.only is None else 1
    tasks = [Task(asked.seed, index, asked.longest) for index in range(start, start + count)]
    run, environment = RUNS[asked.what]
    pool = Pool(run, asked.jobs, asked.timeout, environment)
    found: list[Outcome] = []
    begin = time.monotonic()
    with pool:
        for each in outcomes(pool, tasks):
            found.append(each)
            if asked.what != "battery" or asked.only is not None:
                told(each, len(found), len(tasks), verbose=asked.only is not None)
            if asked.seconds is not None and time.monotonic() - begin > asked.seconds:
                break
    seconds = round(time.monotonic() - begin)
    print(f"\n{asked.what}, seed {asked.seed}, Triton {triton_version()}, {seconds} s")
    print(parts(found, asked.seed) if asked.what == "battery" else table(found))
    if asked.out is not None:
        facts = {"what": asked.what, "seed": asked.seed, "triton": triton_version()}
        write(asked.out, facts | {"seconds": seconds}, found)
    return int(any(each.how != "served" for each in found))


def told(each: Outcome, done: int, of: int, verbose: bool) -> None:
    """A line of progress; all that is known of what went wrong."""
    if each.how != "served":
        print(f"\n{each.index} {each.how}: {each.mod}\n  {each.call}\n{each.message}")
    elif verbose:
        print(f"{each.mod}\n  {each.call}\n  candidate {each.candidate}: {each.config}")
    elif done % 25 == 0:
        print(f"{done} of {of}", flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_mods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=list(COUNTS))
    parser.add_argument("--count", type=int, help="mods, where not as many as above")
    parser.add_argument("--start", type=int, default=0, help="index of the first")
    parser.add_argument("--only", type=int, help="this index alone, with all that is known")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="stop after this time and report what ended")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mod")
    parser.add_argument(
        "--longest", type=int, help="of L and S: 400 to check, 101 interpreted, 200 of masks"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of everything")
    asked = parser.parse_args()
    interpreted = asked.what in ("check", "selections", "battery") and current().interpret
    many = INTERPRETED if interpreted and asked.what == "check" else COUNTS[asked.what]
    asked.count = asked.count or many
    asked.longest = asked.longest or (SHORT if interpreted else LONGEST[asked.what])
    return asked


if __name__ == "__main__":
    sys.exit(main())
