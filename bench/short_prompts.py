"""`python -m bench.short_prompts`: prompts of 64 to 1,024 tokens, by configs of both templates.

Microseconds of a CUDA graph whose L2 is cold: the first configs of both templates, and what sizes
may change of them. The rules by sizes of both families were read from them. Needs a GPU with
wgmma.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from bench.environment import describe
from bench.measured import Measured
from bench.peers import OURS, ours_exactly
from bench.results import RowResult, write
from bench.rows import Row, Shape
from bench.runner import Method, run_row
from bench.tasks import task
from flexattn.device import Device, named
from flexattn.kernels.choose.registry import short
from flexattn.kernels.hopper.space import alternatives, preferences
from flexattn.kernels.triton.family import PREFILL
from flexattn.problem import Problem

RESULTS = Path(__file__).parent / "results" / "h200-short-prompts.json"
METHOD = Method(rounds=5, min_ms=1.5, flush_l2=True, graph=True)
# A row of the file: sizes, mask, and pairs of a config's place among the file's and microseconds.
COLUMNS = ("B", "Hq", "Hkv", "q_len", "D", "mask", "times")
# Of Hopper's preferences, beside what sizes change of the first one.
_FIRST = 3
_LENGTHS = (64, 128, 256, 448, 640, 1024)


def rows() -> Iterator[Row]:
    """Language models' prompts, causal, alone and in batches; images' tokens, full."""
    for D, (hq, hkv) in ((64, (64, 8)), (64, (16, 16)), (128, (32, 8)), (128, (16, 16))):
        for batch, length in product((1, 8), _LENGTHS):
            yield _row(Shape(batch, hq, hkv, length, length, D), "causal")
    for length in (128, 256, 448, 1024):
        yield _row(Shape(1, 71, 1, length, length, 64), "causal")
        yield _row(Shape(1, 40, 8, length, length, 128), "causal")
    for (heads, D), batch in product(((8, 40), (16, 64), (16, 72), (12, 128)), (1, 16)):
        for length in (77, 197, 256, 577):
            yield _row(Shape(batch, heads, heads, length, length, D), "full")


def _row(shape: Shape, mask: Literal["full", "causal"]) -> Row:
    heads = f"{shape.hq}:{shape.hkv}"
    name = f"b{shape.batch}-{heads}-d{shape.d}-{shape.q_len}-{mask}"
    return Row(name, "short", shape, mask)


def configs_of(problem: Problem, device: Device) -> dict[str, Any]:
    """By how a table has them: of each template what rules put first, and what sizes change."""
    hopper = list(preferences(problem.structure))
    triton = PREFILL.at_other_sizes(problem, device)
    every = [*triton, *hopper[:_FIRST], *alternatives(problem, hopper)]
    return {short(each): each for each in every}


def short_prompts(path: Path = RESULTS) -> Iterator[Measured]:
    """The rows of a results file, for fits; none where there is no file yet."""
    if not path.exists():
        return
    held = json.loads(path.read_text())
    environment = held["environments"][0]
    device = named("nvidia-" + environment["device"].removeprefix("NVIDIA ").lower())
    for *sizes, mask, times in held["rows"]:
        batch, hq, hkv, length, D = sizes
        row = _row(Shape(batch, hq, hkv, length, length, D), mask)
        problem = task(row, device, "cpu").problem
        configs = configs_of(problem, device)
        named_times = [(held["configs"][place], us) for place, us in times]
        us = {configs[name]: us for name, us in named_times if name in configs}
        # What a fit leaves out together: the same heads and mask at all lengths.
        title = f"{hq}:{hkv}-d{D}-{mask} B{batch} {length}x{length} short"
        yield Measured(title, environment["triton"], problem, device, us, path)


def _line(row: Row, result: RowResult) -> list[Any]:
    s = row.shape
    times = {
        name.removeprefix(f"{OURS} "): round(samples.median, 2)
        for name, samples in result.samples.items() if not samples.failure
    }  # fmt: skip
    return [s.batch, s.hq, s.hkv, s.q_len, s.d, row.mask, times]


def _save(path: Path, method: Method, lines: Sequence[list[Any]]) -> None:
    """A line a row; names of configs stand once, at the file's head."""
    names = list(dict.fromkeys(name for *_, times in lines for name in times))
    rows = [
        [*sizes, [(names.index(name), us) for name, us in times.items()]]
        for *sizes, times in lines
    ]
    write({
        "schema": 1, "bench": "short-prompts", "method": method.facts(),
        "environments": [describe()], "columns": COLUMNS, "configs": names, "rows": rows,
    }, path)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Time all rows; the status is 1 where a gate is red, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.short_prompts", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--rows", default="", help="a part of names")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: prompts are timed on one", file=sys.stderr)
        return 2
    from flexattn.device import detect

    device, lines, red = detect(torch.device("cuda")), [], 0
    for row in (each for each in rows() if asked.rows in each.name):
        configs = configs_of(task(row, device, "cpu").problem, device)
        peers = {f"{OURS} {name}": ours_exactly(config) for name, config in configs.items()}
        result = run_row(row, peers, METHOD)
        red += sum(not gate.passed for gate in result.gates.values())
        lines.append(_line(row, result))
        print(row.name, lines[-1][-1], *result.refused.values(), flush=True)
        if asked.out:
            _save(asked.out, METHOD, lines)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
