"""`python -m bench.generation_profile`: where a token of bench.generation's rows spends its time.

Of each attention implementation of a row: milliseconds a token, how much of them kernels take, the
longest kernels, and with a cache that grows the host's functions of attention and of masks.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import generation as bench
from bench.peers import OURS
from flexattn.integrations.transformers import register

__all__ = ["main"]

TRACED = ProfilerActivity.CUDA
# What stands before a package in the path of a module.
_FOLDER = re.compile(r"\S*/(?:site|dist)-packages/")
_HOST = "flexattn|sdpa_attention|masking_utils|scaled_dot|eager_attention"


def _kernels(generated: Callable[[int], Any]) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a token, by kernel."""

    def total(tokens: int) -> dict[str, tuple[float, int]]:
        with profile(activities=[TRACED]) as found:
            generated(tokens)
            torch.cuda.synchronize()
        return {each.key: (each.device_time_total, each.count) for each in found.key_averages()}

    few, many, tokens = total(bench.SHORT), total(bench.LONG), bench.LONG - bench.SHORT
    return {
        name: tuple((after - before) / tokens for after, before in zip(
            many[name], few.get(name, (0.0, 0)), strict=True
        ))
        for name in many
    }  # fmt: skip


def _functions(generated: Callable[[int], Any], most: int) -> str:
    """The host's functions of attention and masks in a run of LONG tokens, the longest first."""
    ran, text = cProfile.Profile(), io.StringIO()
    ran.runcall(generated, bench.LONG)
    pstats.Stats(ran, stream=text).sort_stats("cumtime").print_stats(_HOST)
    lines = text.getvalue().partition("ncalls")[2].splitlines()[1 : 1 + most]
    return "\n".join(_FOLDER.sub("", line)[:140] for line in lines)


def report(row: bench.GenerationRow, name: str, most: int) -> str:
    """A row's report of one implementation."""
    model, given = bench._model(row.model), bench._prompts(row)
    model.set_attn_implementation(bench._FREE if name == bench.FREE else name)

    def generated(tokens: int) -> Any:
        return bench._generated(model, row, given, tokens)

    for tokens in (bench.SHORT, bench.LONG):
        generated(tokens)
    ms = [bench._ms_a_token(model, row, given) for _ in range(3)]
    kernels = _kernels(generated)
    busy = sum(us for us, _ in kernels.values())
    lines = [f"{row.name}, {name}: {statistics.median(ms):.3f} ms a token, kernels {busy:.0f} us"]
    for kernel, (us, launches) in sorted(kernels.items(), key=lambda each: -each[1][0])[:most]:
        lines.append(f"  {us:8.1f} us {launches:6.1f}x {kernel[:100]}")
    if not row.options:
        lines.append(_functions(generated, most))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the reports of the rows that match; 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.generation_profile", description=__doc__
    )
    parser.add_argument("--rows", default="", help="a regular expression of names")
    parser.add_argument("--most", type=int, default=12, help="lines of kernels and of functions")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: kernels run on one", file=sys.stderr)
        return 2
    register(OURS)
    bench.register_free()
    for row in bench.ROWS:
        for name in (OURS, row.rival, bench.FREE) if re.search(asked.rows, row.name) else ():
            torch.compiler.reset()
            print(report(row, name, asked.most), flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
