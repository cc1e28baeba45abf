"""python -m tests.random_mods: compile 2,000 random mods with no GPU, or check 500 on one.

`changes` holds 300 mods, whose captures change between calls, to what they capture now; no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import triton

from flexattn.settings import compiler_environment, worker_environment
from flexattn.tune.pool import Pool, default_jobs
from tests.random_mods.changes import changed
from tests.random_mods.checking import checked
from tests.random_mods.compiling import compiled
from tests.random_mods.outcomes import Outcome, Task, outcomes, table, write

COUNTS = {"compile": 2000, "check": 500, "changes": 300}


def main() -> int:
    """Exit status 1 where a mod was not served, or not rightly."""
    asked = parsed()
    start = asked.start if asked.only is None else asked.only
    count = asked.count if asked.only is None else 1
    tasks = [Task(asked.seed, index, asked.longest) for index in range(start, start + count)]
    if asked.what == "compile":
        pool = Pool(compiled, asked.jobs, asked.timeout, compiler_environment)
    elif asked.what == "changes":
        pool = Pool(changed, asked.jobs, asked.timeout, compiler_environment)
    else:
        pool = Pool(checked, asked.jobs, asked.timeout, lambda: worker_environment(0))
    found: list[Outcome] = []
    begin = time.monotonic()
    with pool:
        for each in outcomes(pool, tasks):
            found.append(each)
            told(each, len(found), len(tasks), verbose=asked.only is not None)
    seconds = round(time.monotonic() - begin)
    print(f"\n{asked.what}, seed {asked.seed}, Triton {triton.__version__}, {seconds} s")
    print(table(found))
    if asked.out is not None:
        facts = {"what": asked.what, "seed": asked.seed, "triton": triton.__version__}
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
    parser = argparse.ArgumentParser(prog="python -m tests.random_mods", description=__doc__)
    parser.add_argument("what", choices=list(COUNTS))
    parser.add_argument(
        "--count", type=int, help="mods: 2000 to compile, 500 to check, 300 of changes"
    )
    parser.add_argument("--start", type=int, default=0, help="index of the first")
    parser.add_argument("--only", type=int, help="this index alone, with all that is known")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mod")
    parser.add_argument("--longest", type=int, default=400, help="of L and S, to check")
    parser.add_argument("--out", type=Path, help="a JSON file of everything")
    asked = parser.parse_args()
    asked.count = asked.count or COUNTS[asked.what]
    return asked


if __name__ == "__main__":
    sys.exit(main())
