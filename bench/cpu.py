"""On CPU tensors: our calls, compiled, eager and after install(), beside torch's compiled one.

    python -m bench.cpu --out cpu.json

All are called in turns, so that what else runs on the machine slows each of them. A ratio is the
median over rounds of our time over torch's in the same round; 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

import flexattn
from bench.environment import describe
from flexattn.catalogue import alibi, causal
from flexattn.frontend import on_cpu
from flexattn.frontend.install import torch_own

__all__ = ["BARS", "main", "race"]

# At most so many times the time of torch's compiled call.
BARS = {"compiled": 1.05, "installed": 1.05, "eager": 1.3}
LENGTHS = (128, 1024, 4096)
DTYPES = (torch.float32, torch.bfloat16)
HEADS, WIDTH = 4, 64
MODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-alibi": {"mask": causal, "score_mod": alibi(HEADS, "cpu")},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rows; the status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row's rounds")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write what was found")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows: dict[str, dict[str, float]] = {}
    for name, given in MODS.items():
        for dtype in DTYPES:
            for length in LENGTHS:
                row = f"{name}-{str(dtype).removeprefix('torch.')}-{length}"
                with torch.no_grad(), flexattn.install():
                    rows[row] = race(_calls(length, dtype, **given), args.seconds)
                print(row, rows[row], flush=True)
    if args.out:
        environment = describe() | {"threads": str(args.threads)}
        lines = ",\n  ".join(
            f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()
        )
        args.out.write_text(
            f'{{\n "bench": "cpu",\n "environment": {json.dumps(environment)},\n'
            f' "rows": {{\n  {lines}\n }}\n}}\n'
        )
    return int(any(row[way] > bar for row in rows.values() for way, bar in BARS.items()))


def _calls(
    length: int, dtype: torch.dtype, mask: Any = None, score_mod: Any = None
) -> dict[str, Callable[[], object]]:
    """A call of torch's, compiled, and ours, each compiled by now."""
    torch.compiler.reset()
    on_cpu.forget()
    q, k, v = (torch.randn(1, HEADS, length, WIDTH).to(dtype) for _ in "qkv")
    lists: tuple[Any, ...] = (None, None)
    if mask is not None:
        sizes = mask, None, None, length, length, "cpu"
        lists = theirs.create_block_mask(*sizes), flexattn.create_block_mask(*sizes)

    def layer(*given: Any) -> Any:
        return theirs.flex_attention(*given)

    plain, compiled, installed = map(torch.compile, (torch_own, flexattn.flex_attention, layer))
    calls = {
        "torch": lambda: plain(q, k, v, score_mod, lists[0]),
        "compiled": lambda: compiled(q, k, v, score_mod, lists[1]),
        "installed": lambda: installed(q, k, v, score_mod, lists[0]),
        "eager": lambda: flexattn.flex_attention(q, k, v, score_mod, lists[1]),
    }
    for _ in range(on_cpu.FIRST):
        for call in calls.values():
            call()
    for thread in threading.enumerate():
        if thread.name == on_cpu.THREAD:
            thread.join()
    return calls


def race(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Ratios of each call to the first one, beside its milliseconds and the number of rounds."""
    first, *others = calls
    ratios: dict[str, list[float]] = {name: [] for name in others}
    base: list[float] = []
    end = time.monotonic() + seconds
    while len(base) < 7 or time.monotonic() < end:
        took = {}
        for name in (first, *others) if len(base) % 2 else (*reversed(others), first):
            begin = time.perf_counter()
            calls[name]()
            took[name] = time.perf_counter() - begin
        base.append(took[first] * 1e3)
        for name in others:
            ratios[name].append(took[name] / took[first])
    found = {name: round(statistics.median(each), 3) for name, each in ratios.items()}
    return {f"{first}_ms": round(statistics.median(base), 3), "rounds": len(base), **found}


if __name__ == "__main__":
    raise SystemExit(main())
