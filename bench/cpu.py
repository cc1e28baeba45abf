"""On CPU tensors: our calls, compiled and after install(), beside torch's compiled one.

    python -m bench.cpu --out cpu.json

All are called in turns, so that what else runs on the machine slows each of them. A ratio is the
median over rounds of our time over torch's in the same round; 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

import flexattn
from bench.results import Gate, Report, save
from bench.runner import Kind, Method, Uncounted, run
from bench.table import ratios
from flexattn.catalogue import alibi, causal
from flexattn.frontend.install import torch_own

TORCH = "torch"
# At most so many times the time of torch's compiled call.
BARS = {"compiled": 1.05, "installed": 1.05}
HEADS, WIDTH = 4, 64
METHOD = Method(rounds=40, min_ms=2.0, clock="cpu", device="cpu")


@dataclass(frozen=True)
class CpuRow(Uncounted):
    """A call on CPU tensors of so many queries and keys, plain or with mods."""

    length: int
    dtype: torch.dtype
    mods: bool
    group = "cpu"

    @property
    def name(self) -> str:
        """As a line has it."""
        mods = "causal-alibi" if self.mods else "plain"
        return f"{mods}-{str(self.dtype).removeprefix('torch.')}-{self.length}"


ROWS = tuple(
    CpuRow(length, dtype, mods)
    for mods in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
    for length in (128, 1024, 4096)
)


def _make(row: CpuRow, method: Method) -> dict[str, Callable[[], object]]:
    """A call of torch's, compiled, and ours, each compiled by now."""
    torch.compiler.reset()
    q, k, v = (torch.randn(1, HEADS, row.length, WIDTH).to(row.dtype) for _ in "qkv")
    score, lists = None, (None, None)
    if row.mods:
        score, sizes = alibi(HEADS, "cpu"), (causal, None, None, row.length, row.length, "cpu")
        lists = theirs.create_block_mask(*sizes), flexattn.create_block_mask(*sizes)

    def layer(*given: Any) -> Any:
        return theirs.flex_attention(*given)

    plain, compiled, installed = map(torch.compile, (torch_own, flexattn.flex_attention, layer))
    calls = {
        TORCH: lambda: plain(q, k, v, score, lists[0]),
        "compiled": lambda: compiled(q, k, v, score, lists[1]),
        "installed": lambda: installed(q, k, v, score, lists[0]),
    }
    for call in calls.values():
        call()
    return calls


CPU = Kind(_make, lambda call, calls: Gate(True, ""), lambda name, calls: calls[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rows; the status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--rounds", type=int, default=METHOD.rounds)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write what was found")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    def show(report: Report, seconds: float) -> None:
        row = replace(report, rows=report.rows[-1:])
        found = {way: round(*ratios(row, way, TORCH).values(), 3) for way in BARS}
        print(row.rows[0].name, found, flush=True)

    peers = {name: name for name in (TORCH, *BARS)}
    with torch.no_grad(), flexattn.install():
        report = run("cpu", ROWS, peers, replace(METHOD, rounds=args.rounds), show, CPU)
    report = replace(report, method=report.method | {"threads": args.threads})
    if args.out:
        save(report, args.out)
    missed = (
        ratio > bar for way, bar in BARS.items() for ratio in ratios(report, way, TORCH).values()
    )
    return int(any(missed))


if __name__ == "__main__":
    raise SystemExit(main())
