"""Block masks: what create_block_mask costs at long lengths, in time and in memory.

    python -m bench.blocks --out blocks.json

Each mask has a fresh process with empty caches, so its first call compiles; imports, the CUDA
context and a first trace are not counted. The processes import at the same time and wait; then
each is let go when the one before has ended, so that nobody else runs while it is timed. Before a
process compiles anything Triton hashes all of its own files: that counts as an import and stands
beside the first call. Without a GPU the masks of 65,536 tokens are made on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.blocks_child import LONG, READY, ROWS, Row

__all__ = ["failures", "main", "table"]

ROOT = Path(__file__).resolve().parent.parent
# What every call may take: ms of the first, MB beyond the result of a mask of 65,536 tokens, and
# ms on a CPU.
FIRST_MS, BEYOND_MB, CPU_MS = 500.0, 50.0, 1000.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where a limit is passed, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m bench.blocks", description=__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="the masks whose name matches")
    parser.add_argument("--rounds", type=int, default=20, help="calls after the first")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: the GPU if there is one"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every sample")
    args = parser.parse_args(argv)
    import torch

    from bench.environment import describe
    from bench.results import write

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = [row for row in ROWS if re.search(args.rows, row.name)]
    if device == "cpu":
        rows = [row for row in rows if row.length == LONG]
    if not rows:
        names = ", ".join(row.name for row in ROWS)
        print(f"--rows {args.rows!r} matches no mask of {device}: {names}", file=sys.stderr)
        return 2
    found = _measured(rows, device, args.rounds)
    if args.out:
        report = {
            "schema": 1, "bench": "blocks", "device": device, "environment": describe(),
            "samples": found,
        }  # fmt: skip
        write(report, args.out)
    print(table(found, device))
    missed = failures(found, device)
    print("\n".join(["", *missed]) if missed else "\nwithin every limit")
    return int(bool(missed))


def table(found: Mapping[str, Mapping[str, Any]], device: str) -> str:
    """First call, median and slowest call in ms, the result and the peak beyond it in MB."""
    head = [
        "mask",
        "first ms",
        "Triton's start ms",
        "median ms",
        "slowest ms",
        "limit ms",
        "result MB",
        "beyond MB",
    ]
    lines = [[*head, "partial", "full"], ["---"] * (len(head) + 2)]
    for row in ROWS:
        if row.name in found:
            each = found[row.name]
            ms = [each["first"], each["compiler"]]
            ms += [statistics.median(each["seconds"]), max(each["seconds"])]
            cells = [f"{1e3 * seconds:.2f}" for seconds in ms] + [f"{_limit(row, device):g}"]
            cells += [f"{each[name] / 1e6:.1f}" for name in ("result", "beyond")]
            lines.append([row.name, *cells, str(each["partial"]), str(each["full"])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failures(found: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """Which limits were passed, in words."""
    missed = []
    for row in ROWS:
        each = found.get(row.name)
        if each is None:
            continue
        median = 1e3 * statistics.median(each["seconds"])
        if median > _limit(row, device):
            missed.append(f"{row.name}: {median:.2f} ms, above {_limit(row, device):g}")
        first = CPU_MS if device == "cpu" else FIRST_MS
        if 1e3 * each["first"] > first:
            missed.append(f"{row.name}: first call {1e3 * each['first']:.0f} ms, above {first:g}")
        if device == "cuda" and row.length == LONG and each["beyond"] > 1e6 * BEYOND_MB:
            missed.append(f"{row.name}: {each['beyond'] / 1e6:.1f} MB beyond the result")
    return missed


def _limit(row: Row, device: str) -> float:
    return CPU_MS if device == "cpu" else row.limit_ms


def _measured(rows: Sequence[Row], device: str, rounds: int) -> dict[str, Any]:
    """What each row's process found. They import together; then one runs, and the others wait."""
    with ExitStack() as open_until_the_end:
        waiting = {
            row: _start(
                row, device, rounds, open_until_the_end.enter_context(TemporaryDirectory())
            )
            for row in rows
        }
        open_until_the_end.callback(_end, list(waiting.values()))
        for row, child in waiting.items():
            _expect(READY, row, child)
        found = {}
        for row, child in waiting.items():
            told, errors = child.communicate("go\n")
            if child.returncode:
                raise RuntimeError(f"bench.blocks_child {row.name} failed:\n{errors}")
            found[row.name] = json.loads(told.splitlines()[-1])
        return found


def _start(row: Row, device: str, rounds: int, folder: str) -> subprocess.Popen[str]:
    own = {"TRITON_CACHE_DIR": f"{folder}/triton", "FLEXATTN_CACHE_DIR": f"{folder}/own"}
    kept = {name: value for name, value in os.environ.items() if name != "FLEXATTN_BINARIES"}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.blocks_child", row.name, device, str(rounds)],
        env=kept | own, cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _expect(line: str, row: Row, child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    while said := child.stdout.readline():
        if said.strip() == line:
            return
    _, errors = child.communicate()
    raise RuntimeError(f"bench.blocks_child {row.name} failed:\n{errors}")


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
            child.communicate()


if __name__ == "__main__":
    sys.exit(main())
