"""`python -m bench.blocks`: time and memory of create_block_mask at long lengths.

A row is red where its median passes its limit, or where memory at the peak is more than 50 MB
beyond the result of a mask of 65,536 tokens. `bench.cold` times the first call of a process.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.command import main
from bench.peers import OURS
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, in_turns, wall_us
from flexattn import catalogue, create_block_mask

LONG, LONGEST = 65536, 1048576
DOCUMENTS, CANVAS = 64, 256
BEYOND = 50_000_000
METHOD = Method(rounds=20)


@dataclass(frozen=True)
class MaskRow(Uncounted):
    """A mask, the length of its queries and keys, and the limit of a call in ms."""

    mask: str
    length: int
    limit_ms: float
    group = "blocks"

    @property
    def name(self) -> str:
        """As --rows matches it."""
        return f"{self.mask}-{'64k' if self.length == LONG else '1m'}"


ROWS = tuple(
    MaskRow(mask, LONG, 5.0) for mask in ("causal", "window", "documents", "prefix", "natten")
) + tuple(MaskRow(mask, LONGEST, 20.0) for mask in ("causal", "window"))


@dataclass(frozen=True)
class Masked:
    """A row and its mask_mod; a call makes the lists."""

    row: MaskRow
    mask_mod: Any
    device: str

    def __call__(self) -> Any:
        length = self.row.length
        return create_block_mask(self.mask_mod, None, None, length, length, self.device)


def _make(row: MaskRow, method: Method) -> Masked:
    device = method.device
    if row.mask == "documents":
        starts = torch.randperm(row.length, generator=torch.Generator().manual_seed(0))
        ids = torch.zeros(row.length, dtype=torch.int32)
        ids[starts[: DOCUMENTS - 1]] = 1
        return Masked(row, catalogue.document(ids.cumsum(0, dtype=torch.int32).to(device)), device)
    known: dict[str, Callable[[], Any]] = {
        "causal": lambda: catalogue.causal,
        "window": lambda: catalogue.sliding_window(4096),
        "natten": lambda: catalogue.natten_2d(CANVAS, row.length // CANVAS, 13),
        "prefix": lambda: catalogue.prefix_lm(torch.tensor([5000], device=device)),
    }
    return Masked(row, known[row.mask](), device)


def beyond(x: Masked) -> int:
    """Bytes at the peak of a call beyond its result; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = x()
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    result = sum(each.nbytes for each in lists)
    return max(0, torch.cuda.max_memory_allocated() - before - result)


def _judge(call: Masked, x: Masked) -> Gate:
    """The median of some calls within the row's limit, and memory within its own."""
    ms, over = statistics.median(wall_us(call) for _ in range(7)) / 1e3, beyond(call)
    said = f"{ms:.2f} ms of {x.row.limit_ms:g}, {over / 1e6:.1f} MB beyond the result"
    return Gate(ms <= x.row.limit_ms and (x.row.length != LONG or over <= BEYOND), said)


BLOCKS = Kind(_make, _judge, lambda peer, x: x, race=in_turns(wall_us))
run = partial(main, "blocks", ROWS, METHOD, known={OURS: OURS}, kind=BLOCKS)

if __name__ == "__main__":
    sys.exit(run())
