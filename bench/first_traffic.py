"""The first seconds of traffic where nothing was tuned: what is the longest stall after warm()?

    python -m bench.first_traffic --out first_traffic.json --trace first_traffic.trace.json

Fresh processes with empty caches warm up as the manual tells a server to, then serve requests of
random lengths, each waited for. One looks for records, as users' processes do, one has them off,
and one is profiled: its trace opens in chrome://tracing or Perfetto. A stall is the wall time of
a call, the GPU's work included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.time_limit import SECONDS

__all__ = ["LIMIT_MS", "MODES", "distribution", "faults", "main", "table"]

# The longest stall that the warm-up may leave.
LIMIT_MS = 50.0
# What FLEXATTN_MODE is, by how a process is called in the results.
MODES = {"records looked for": "replay", "records off": "off"}
PROFILED = "profiled"
# Calls of a process that a file of results names.
SLOWEST = 10
ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where traffic stalled, compiled or traced, 2 without a GPU.

    The profiled process is not judged by its times, which have the profiler's part in them.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.first_traffic", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of traffic in each process")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write what was found")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write a profiled run")
    args = parser.parse_args(argv)
    import torch

    from bench.environment import describe

    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a stall is one of a GPU's traffic", file=sys.stderr)
        return 2
    asked = ["--seconds", str(args.seconds), "--seed", str(args.seed)]
    found = {name: _child(mode, asked) for name, mode in MODES.items()}
    if args.trace:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        found[PROFILED] = _child("replay", [*asked, "--trace", str(args.trace.resolve())])
    wrong = faults(found)
    if args.out:
        report = {
            "schema": 1, "bench": "first_traffic", "environment": describe(),
            "method": {"seconds": args.seconds, "seed": args.seed, "limit_ms": LIMIT_MS},
            "processes": {name: _shortened(each) for name, each in found.items()},
            "faults": wrong,
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(found), *wrong, sep="\n")
    return int(bool(wrong))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each process and kind of call, in milliseconds; then the slowest call of each."""
    head = ["process", "calls", "count", "median ms", "99 % ms", "longest ms"]
    lines = [head, ["---"] * len(head)]
    for name, each in found.items():
        for kind, walls in each["wall_ms"].items():
            count, *figures = distribution(walls).values()
            lines.append([name, kind, str(count), *(f"{ms:.2f}" for ms in figures)])
    slowest = [
        f"{name}: warm-up {each['warm_seconds']:.1f} s, {each['kernels']} kernels; "
        f"slowest {each['slowest'][0]['call']}, {each['slowest'][0]['wall_ms']:.1f} ms "
        f"({each['slowest'][0]['host_ms']:.1f} of the host, "
        f"{each['slowest'][0]['device_ms']:.1f} of the GPU)"
        for name, each in found.items()
    ]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *slowest])


def distribution(times: Sequence[float]) -> dict[str, float]:
    """The figures that a file keeps of many times."""
    ordered = sorted(times)
    return {
        "count": len(times), "median": statistics.median(times),
        "99 %": ordered[int(0.99 * len(times))], "longest": ordered[-1],
    }  # fmt: skip


def _shortened(each: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a process that a file keeps: figures of its calls, and the slowest ones."""
    walls = {kind: distribution(ms) for kind, ms in each["wall_ms"].items()}
    return {**each, "wall_ms": walls, "slowest": each["slowest"][:SLOWEST]}


def faults(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The faults that the traffic met, in words."""
    wrong = []
    for name, each in found.items():
        longest = max(ms for walls in each["wall_ms"].values() for ms in walls)
        if name != PROFILED and longest > LIMIT_MS:
            wrong.append(f"{name}: a stall of {longest:.1f} ms, {LIMIT_MS:g} are allowed")
        for what in ("compiled", "traced", "filled"):
            if each[what]:
                wrong.append(f"{name}: {each[what]} {what} after the warm-up")
        if set(each["served"]) - {"default"}:
            wrong.append(f"{name}: tuned records served, {each['served']}")
    return wrong


def _child(mode: str, asked: Sequence[str]) -> Any:
    """The findings of one fresh process, which has directories of its own for all that is kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLEXATTN_")}
    with tempfile.TemporaryDirectory() as empty:
        own = {
            "FLEXATTN_CACHE_DIR": f"{empty}/own", "TRITON_CACHE_DIR": f"{empty}/triton",
            "FLEXATTN_MODE": mode,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "bench.first_traffic_child", *asked],
            env=kept | own, cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=2 * SECONDS,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"bench.first_traffic_child failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
