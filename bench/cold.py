"""Cold starts: the first call of a tuned problem in fresh processes.

    python -m bench.cold --out cold.json

The config comes from a record; its kernel is compiled, taken from Triton's cache or loaded as a
binary. Each sample is a process of its own. Imports and the CUDA context are timed apart, and so
is what only a trace or a compile imports; the first call is everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.cold_child import LENGTHS
from bench.time_limit import SECONDS

__all__ = ["MODES", "main", "table"]

# Whether Triton's cache is kept between processes, and whether the exported directory is named.
MODES = {
    "empty Triton cache": (False, False),
    "warm Triton cache": (True, False),
    "binaries": (False, True),
}
ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where a process with binaries compiled or traced.

    Raises RuntimeError for a process that was not served by the record.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.cold", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind and mode")
    parser.add_argument("--kinds", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE",
        help=f"out of {', '.join(map(repr, MODES))}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every sample")
    args = parser.parse_args(argv)
    import torch

    from bench.environment import describe
    from bench.results import write

    if not torch.cuda.is_available():
        print("no GPU is visible to torch: a cold start is one of a GPU", file=sys.stderr)
        return 2
    found: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / kind for kind in args.kinds]
        # How good the configs are does not matter here: their tunings may disturb each other.
        with ThreadPoolExecutor() as pool:
            list(pool.map(_export, args.kinds, folders))
        for kind, own in zip(args.kinds, folders, strict=True):
            found[kind] = _samples(kind, args.modes, args.rounds, own)
    if args.out:
        report = {"schema": 1, "bench": "cold", "environment": describe(), "samples": found}
        write(report, args.out)
    print(table(found))
    loaded = (each for modes in found.values() for each in modes.get("binaries", ()))
    return int(any(map(_worked, loaded)))


def table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Median milliseconds of each step, a row for each kind and mode."""
    steps = list(next(iter(next(iter(found.values())).values()))[0]["seconds"])
    head = ["first call of", "with", *(f"{name} ms" for name in steps), "compiled", "traced"]
    lines = [head, ["---"] * len(head)]
    for kind, modes in found.items():
        for mode, samples in modes.items():
            medians = [
                1e3 * statistics.median(s["seconds"][name] for s in samples) for name in steps
            ]
            worked = [max(s[name] for s in samples) for name in ("compiled", "traces")]
            lines.append([kind, mode, *(f"{ms:.1f}" for ms in medians), *map(str, worked)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _export(kind: str, folder: Path) -> None:
    folder.mkdir()
    own = {"TRITON_CACHE_DIR": str(folder / "warm"), "FLEXATTN_CACHE_DIR": str(folder / "none")}
    _child(own, "export", kind, str(folder / "exported"))


def _samples(kind: str, modes: Sequence[str], rounds: int, folder: Path) -> dict[str, list[Any]]:
    """Modes in turns, so that a machine that warms up warms up for all of them."""
    exported = folder / "exported"
    found: dict[str, list[Any]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            warm, binaries = MODES[mode]
            with tempfile.TemporaryDirectory(dir=folder) as empty:
                cache = str(folder / "warm") if warm else empty
                environment = {
                    "TRITON_CACHE_DIR": cache,
                    "FLEXATTN_CACHE_DIR": empty,
                    "FLEXATTN_CACHE": str(folder / "records"),
                }
                if binaries:
                    environment["FLEXATTN_BINARIES"] = str(exported)
                compiler = "none" if binaries else "compiler"
                found[mode].append(_child(environment, "run", kind, compiler))
    if {each["how"] for samples in found.values() for each in samples} != {"hit"}:
        raise RuntimeError(f"{kind}: a process was not served by the record")
    if len({each["checksum"] for samples in found.values() for each in samples}) != 1:
        raise RuntimeError(f"{kind}: the modes computed different outputs")
    return found


def _child(environment: Mapping[str, str], *arguments: str) -> Any:
    ours = ("FLEXATTN_BINARIES", "FLEXATTN_CACHE", "FLEXATTN_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bench.cold_child", *arguments],
        env=kept | dict(environment), cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"bench.cold_child {' '.join(arguments)} failed:\n{done.stderr}")
    took = time.perf_counter() - started
    print(f"[{took:.1f} s] {' '.join(arguments[:2])}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def _worked(sample: Mapping[str, Any]) -> bool:
    return bool(sample["compiled"] or sample["traces"])


if __name__ == "__main__":
    sys.exit(main())
