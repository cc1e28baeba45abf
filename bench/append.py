"""`python -m bench.append`: storing new keys and values in pages, beside a copy of as many bytes.

Each row is timed in graph replays from a cold L2. Bytes are those that must be read and written:
K and V as they come, what the cache holds of them, and scales where these are stored.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.environment import describe
from bench.peers import OURS
from flexattn.errors import InputError
from flexattn.measure.timing import time_interleaved
from flexattn.serving import AppendPlan, Rope
from flexattn.serving.cache import Scaled

__all__ = ["AppendRow", "append_rows", "copy_of", "main", "storing"]

COPY = "copy of as many bytes"
PAGE, HEADS, D = 16, 8, 128


@dataclass(frozen=True)
class AppendRow:
    """New tokens of bfloat16, 8 heads of 128, in pages of 16 in random order."""

    name: str
    tokens: int
    kv_dtype: torch.dtype = torch.float8_e4m3fn
    scaled: Scaled = False
    rope: bool = False

    @property
    def bytes_moved(self) -> int:
        """Bytes that are read and written once."""
        scales = 4 if self.scaled == "token_head" else 0
        return 2 * self.tokens * HEADS * (D * (2 + self.kv_dtype.itemsize) + scales)


def append_rows() -> list[AppendRow]:
    """Steps of decoding and chunks of prefill; a plain store, and what eight bits add to it."""
    rows = []
    for name, tokens in (("decode-64", 64), ("decode-256", 256), ("chunk-8k", 8192)):
        rows += [
            AppendRow(f"{name}-bf16", tokens, torch.bfloat16),
            AppendRow(f"{name}-e4m3", tokens, scaled=True),
            AppendRow(f"{name}-e4m3-token-head", tokens, scaled="token_head"),
            AppendRow(f"{name}-e4m3-token-head-rope", tokens, scaled="token_head", rope=True),
        ]
    return rows


def storing(row: AppendRow, device: str = "cuda") -> Callable[[], None]:
    """A call that stores the row's tokens."""
    draw = torch.Generator(device).manual_seed(row.tokens)
    shape = (row.tokens, HEADS, D)
    k, v = (
        torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    pages = 4 * -(-row.tokens // PAGE)
    cache = tuple(
        torch.zeros(pages, PAGE, HEADS, D, device=device).to(row.kv_dtype) for _ in range(2)
    )
    order = torch.randperm(pages, generator=draw, device=device)[:, None] * PAGE
    slots = (order + torch.arange(PAGE, device=device)).flatten()[: row.tokens].contiguous()
    call = {"slot_mapping": slots}
    if row.scaled:
        shape = (pages, PAGE, HEADS) if row.scaled == "token_head" else (1,)
        call |= {name: torch.ones(shape, device=device) for name in ("k_scale", "v_scale")}
    if row.rope:
        call["positions"] = torch.arange(row.tokens, device=device)
        angles = call["positions"][:, None] * Rope(D, base=1e4).inv_freq().to(device)
        call |= {"cos": angles.cos(), "sin": angles.sin()}
    plan = AppendPlan(
        heads=HEADS, head_dim=D, page_size=PAGE, kv_dtype=row.kv_dtype, scaled=row.scaled,
        rope=Rope(D) if row.rope else None, device=device,
    )  # fmt: skip
    return lambda: plan.run(k, v, (cache[0], cache[1]), **call)


def copy_of(row: AppendRow, device: str = "cuda") -> Callable[[], torch.Tensor]:
    """A call that reads half of the row's bytes and writes as many."""
    source = torch.ones(row.bytes_moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the rows; the status is 1 where one of ours has no time."""
    parser = argparse.ArgumentParser(prog="python -m bench.append", description=__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="run the rows that match")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each candidate")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(InputError("no GPU is visible to torch", "a bench times a GPU"), file=sys.stderr)
        return 2
    print(describe())
    status = 0
    print("| row | us | GB/s | copy, us | of the copy's speed |\n|---|---|---|---|---|")
    for row in append_rows():
        if not re.search(args.rows, row.name):
            continue
        found = time_interleaved(
            {OURS: storing(row), COPY: copy_of(row)}, rounds=args.rounds, min_ms=2.0,
            flush_l2=True, graph=True,
        )  # fmt: skip
        ours, copy = found[OURS], found[COPY]
        if ours.failure:
            print(f"| {row.name} | {ours.failure} | | | |")
            status = 1
            continue
        speed = row.bytes_moved / ours.median / 1e3
        print(
            f"| {row.name} | {ours.median:.2f} | {speed:.0f} | {copy.median:.2f} | "
            f"{copy.median / ours.median:.2f} |"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
