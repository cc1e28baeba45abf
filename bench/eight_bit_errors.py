"""`python -m bench.eight_bit_errors`: what e4m3 costs in accuracy, and `quantize` in time.

Errors are of outputs, root mean squares, as shares of attention of the same 16-bit numbers in
float64. Ours has factors of heads, or of blocks of 128 with K smoothed, and exact or rounded
weights; FlashAttention-3 factors of heads. Then the time of `quantize`, beside attention's.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.environment import describe
from bench.inputs import Inputs, attention
from bench.peers import OURS, Refusal, fa3
from bench.results import write
from bench.rows import HEADS, TOKENS, Row, Shape
from flexattn import flex_attention, quantize
from flexattn.errors import FlexAttnError
from flexattn.measure.timing import time_interleaved

LENGTH, HEADS_CHECKED, BLOCK = 4096, 4, 128
# How many columns are large, of a hundred, and by how much; directions of rows of low rank.
PERCENT, LARGE, RANK = 1, 30.0, 8
KINDS = ("normal", "outliers", "biased", "low-rank")


def numbers(kind: str, name: str, length: int, d: int, device: str) -> Tensor:
    """A q, k or v [1, heads, length, d] of bfloat16; name: which, from which it is drawn.

    outliers: columns of normal numbers, of each head its own, times LARGE. biased: the same
    columns of K are moved by LARGE instead, as in models, and q and v are normal. low-rank:
    noise and RANK directions, of which all rows of K share the first.
    """
    draw = torch.Generator(device).manual_seed(zlib.crc32(f"{kind} {name} {d}".encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, HEADS_CHECKED, *shape, generator=draw, device=device)

    found = normal(length, d)
    columns = normal(1, d).argsort(-1) < max(1, round(PERCENT * d / 100))
    if kind == "outliers":
        found = torch.where(columns, found * LARGE, found)
    elif kind == "biased" and name == "k":
        found = torch.where(columns, found + LARGE, found)
    elif kind == "low-rank":
        parts = normal(length, RANK)
        if name == "k":
            parts[..., 0] = RANK**0.5
        found = 0.3 * found + parts @ normal(RANK, d) / RANK**0.5
    return found.bfloat16()


def of_ours(tensors: list[Tensor], weights: str, fine: bool) -> Callable[[], Tensor]:
    """flex_attention of what `quantize` makes of them. fine: by block, and smoothed."""
    made = quantize(*tensors, block=BLOCK if fine else None, smooth=fine)
    mod, options = made.score_mod(), {"FP8_WEIGHTS": weights}
    return lambda: flex_attention(  # type: ignore[return-value]
        *made.tensors, mod, kernel_options=options, **made.descales
    )


def of_fa3(tensors: list[Tensor]) -> Callable[[], Tensor] | Refusal:
    """FlashAttention-3's with factors of heads, [1, heads, length, d] again."""
    made, (_, heads, length, d) = quantize(*tensors), tensors[0].shape
    row = Row("errors", "fp8", Shape(1, heads, heads, length, length, d), fp8=True)
    call = fa3(Inputs(row, *made.tensors, None, None, None, tuple(made.descales.values())))  # type: ignore[arg-type]
    return call if isinstance(call, Refusal) else lambda: call().transpose(1, 2)


def error_row(kind: str, d: int, length: int, device: str) -> dict[str, Any]:
    """The errors of one kind of numbers at a head dimension."""
    tensors = [numbers(kind, name, length, d, device) for name in "qkv"]
    rows = torch.arange(length, device=device)
    exact = torch.stack(
        [
            attention(*(x[0, h].double() for x in tensors), (0, h), rows, None, None)
            for h in range(HEADS_CHECKED)
        ]
    )[None]
    calls: dict[str, Callable[[], Tensor] | Refusal] = {
        f"{weights} {'blocks' if fine else 'heads'}": of_ours(tensors, weights, fine)
        for weights in ("exact", "e4m3")
        for fine in (False, True)
    }
    calls |= {"bf16": lambda: flex_attention(*tensors), "fa3": of_fa3(tensors)}  # type: ignore[dict-item]
    found: dict[str, Any] = {"row": f"d{d}-{kind}"}
    for name, call in calls.items():
        try:
            said = call.reason if isinstance(call, Refusal) else call().double() - exact
        except FlexAttnError as error:
            said = str(error).splitlines()[0]
        found[name] = said if isinstance(said, str) else float(said.norm() / exact.norm())
    return found


def times(d: int, rounds: int) -> dict[str, Any]:
    """Microseconds of `quantize` and of attention, full, on a GPU."""
    shape = TOKENS // 8192, HEADS[d], 8192, d
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Any] = {
        "quantize heads": lambda: quantize(q, k, v),
        "quantize blocks": lambda: quantize(q, k, v, block=BLOCK, smooth=True),
        f"{OURS} heads": of_ours([q, k, v], "exact", False),
        f"{OURS} blocks": of_ours([q, k, v], "exact", True),
        "bf16": lambda: flex_attention(q, k, v),
    }
    samples = time_interleaved(calls, rounds=rounds, min_ms=5.0, flush_l2=False, graph=False)
    return {"row": f"d{d}-8k", **{name: each.median for name, each in samples.items()}}


def table(rows: list[dict[str, Any]], form: str) -> str:
    """Rows in Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    for row in rows:
        cells = (row[name] for name in names)
        lines.append([each if isinstance(each, str) else format(each, form) for each in cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: the numbers are for reading."""
    parser = argparse.ArgumentParser(prog="python -m bench.eight_bit_errors", description=__doc__)
    parser.add_argument("--length", type=int, default=LENGTH, help="of queries and keys")
    parser.add_argument("--rounds", type=int, default=10, help="samples of each time")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    errors = [error_row(kind, d, asked.length, device) for d in HEADS for kind in KINDS]
    print(table(errors, ".4f"))
    took = [times(d, asked.rounds) for d in HEADS] if gpu else []
    if took:
        print("\n" + table(took, ".1f"))
    if asked.out:
        facts = {"bench": "eight-bit-errors", "length": asked.length}
        write(facts | {"environments": [describe()], "errors": errors, "us": took}, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
