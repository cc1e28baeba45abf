"""`python -m bench.blocks`: time and memory of create_block_mask at long lengths.

A mask's first call compiles, as no cache on disk is used. Without a GPU the masks of 65,536 tokens
are made on the CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROWS", "Row", "failures", "main", "measured", "table"]

LONG, LONGEST = 65536, 1048576
DOCUMENTS, CANVAS = 64, 256
# Limits of every call: ms of the first one, MB beyond the result of a mask of 65,536 tokens, and
# ms on a CPU.
FIRST_MS, BEYOND_MB, CPU_MS = 500.0, 50.0, 1000.0


@dataclass(frozen=True)
class Row:
    """A mask, the length of its queries and keys, and the limit of a call on a GPU in ms."""

    name: str
    mask: str
    length: int
    limit_ms: float


ROWS = tuple(
    Row(f"{mask}-64k", mask, LONG, 5.0)
    for mask in ("causal", "window", "documents", "prefix", "natten")
) + tuple(Row(f"{mask}-1m", mask, LONGEST, 20.0) for mask in ("causal", "window"))


def mask_of(row: Row, device: str) -> Callable[..., Any]:
    """The row's mask_mod."""
    import torch

    from flexattn import catalogue

    if row.mask == "documents":
        starts = torch.randperm(row.length, generator=torch.Generator().manual_seed(0))
        ids = torch.zeros(row.length, dtype=torch.int32)
        ids[starts[: DOCUMENTS - 1]] = 1
        return catalogue.document(ids.cumsum(0, dtype=torch.int32).to(device))
    known: dict[str, Callable[[], Any]] = {
        "causal": lambda: catalogue.causal,
        "window": lambda: catalogue.sliding_window(4096),
        "natten": lambda: catalogue.natten_2d(CANVAS, row.length // CANVAS, 13),
        "prefix": lambda: catalogue.prefix_lm(torch.tensor([5000], device=device)),
    }
    return known[row.mask]()  # type: ignore[no-any-return]


def measured(row: Row, device: str, rounds: int) -> dict[str, Any]:
    """Seconds of the first call and of each later one, and bytes at the peak beyond the result."""
    import torch

    from flexattn import create_block_mask

    mask_mod = mask_of(row, device)

    def timed() -> tuple[float, Any]:
        begin = time.perf_counter()
        mask = create_block_mask(mask_mod, None, None, row.length, row.length, device)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin, mask

    def memory() -> int:
        if device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return torch.cuda.max_memory_allocated()

    first, mask = timed()
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    result = sum(each.numel() * each.element_size() for each in lists)
    partial, full = (int(each.sum(dtype=torch.int64)) for each in lists[::2])
    del lists, mask
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    before = memory()
    seconds = [timed()[0] for _ in range(rounds)]
    return {
        "first": first, "seconds": seconds, "beyond": max(0, memory() - before - result),
        "result": result, "partial": partial, "full": full,
    }  # fmt: skip


def table(found: Mapping[str, Mapping[str, Any]], device: str) -> str:
    """First call, median and slowest call in ms, the result and the peak beyond it in MB."""
    head = ["mask", "first ms", "median ms", "slowest ms", "limit ms", "result MB", "beyond MB"]
    lines = [[*head, "partial", "full"], ["---"] * (len(head) + 2)]
    for row in ROWS:
        if row.name in found:
            each = found[row.name]
            times = (each["first"], statistics.median(each["seconds"]), max(each["seconds"]))
            cells = [f"{1e3 * seconds:.2f}" for seconds in times] + [f"{_limit(row, device):g}"]
            cells += [f"{each[name] / 1e6:.1f}" for name in ("result", "beyond")]
            lines.append([row.name, *cells, str(each["partial"]), str(each["full"])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failures(found: Mapping[str, Mapping[str, Any]], device: str) -> list[str]:
    """Each limit that was passed, in words."""
    missed = []
    for row in (row for row in ROWS if row.name in found):
        each = found[row.name]
        median, first = 1e3 * statistics.median(each["seconds"]), 1e3 * each["first"]
        most = CPU_MS if device == "cpu" else FIRST_MS
        if median > _limit(row, device):
            missed.append(f"{row.name}: {median:.2f} ms, above {_limit(row, device):g}")
        if first > most:
            missed.append(f"{row.name}: first call {first:.0f} ms, above {most:g}")
        if device == "cuda" and row.length == LONG and each["beyond"] > 1e6 * BEYOND_MB:
            missed.append(f"{row.name}: {each['beyond'] / 1e6:.1f} MB beyond the result")
    return missed


def _limit(row: Row, device: str) -> float:
    return CPU_MS if device == "cpu" else row.limit_ms


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where a limit is passed, 2 for a bad request."""
    parser = argparse.ArgumentParser(prog="python -m bench.blocks", description=__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="the masks whose name matches")
    parser.add_argument("--rounds", type=int, default=20, help="calls after the first")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, if any")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every sample")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("TRITON_CACHE_DIR", "FLEXATTN_CACHE_DIR"):
            os.environ.setdefault(name, f"{folder}/{name}")  # read by the imports below
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch

    from bench.choosing import matching
    from bench.environment import describe
    from bench.results import write
    from flexattn import create_block_mask
    from flexattn.errors import InputError

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    known = [row for row in ROWS if device != "cpu" or row.length == LONG]
    try:
        rows = matching(known, args.rows, "--rows", "mask", lambda row: row.name)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    # Triton hashes its own files before its first compile, whatever that is.
    create_block_mask(lambda b, h, q, k: q + h != k, None, None, 256, 256, device)
    found = {row.name: measured(row, device, args.rounds) for row in rows}
    if args.out:
        about = {"schema": 1, "bench": "blocks", "device": device, "environment": describe()}
        write(about | {"samples": found}, args.out)
    print(table(found, device))
    missed = failures(found, device)
    print("\n".join(["", *missed]) if missed else "\nwithin every limit")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
