"""One fresh process of the block mask bench: a mask's first call, and those after it.

Imports, the CUDA context and the first trace come before; then it prints READY, and waits for a
line. Run by `bench.blocks`; prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["READY", "ROWS", "Row", "run"]

READY = "ready"

LONG, LONGEST = 65536, 1048576
DOCUMENTS, PREFIX, WINDOW, CANVAS, NEAR = 64, 5000, 4096, 256, 13


@dataclass(frozen=True)
class Row:
    """A mask, the length of its queries and keys, and what a call may take on a GPU, in ms."""

    name: str
    mask: str
    length: int
    limit_ms: float


ROWS = (
    Row("causal-64k", "causal", LONG, 5.0),
    Row("window-64k", "window", LONG, 5.0),
    Row("documents-64k", "documents", LONG, 5.0),
    Row("prefix-64k", "prefix", LONG, 5.0),
    Row("natten-64k", "natten", LONG, 5.0),
    Row("causal-1m", "causal", LONGEST, 20.0),
    Row("window-1m", "window", LONGEST, 20.0),
)


def run(row: Row, device: str, rounds: int, wait: Callable[[], object]) -> dict[str, Any]:
    """Seconds of the first call and of each later one, and bytes at the peak beyond the result.

    wait: called once, before anything is timed. compiler: seconds that Triton spends on itself,
    once a process, before its first compile, whatever that is: no part of `first`.
    """
    import torch
    import torch._dynamo
    import triton.compiler.code_generator  # noqa: F401  (at its first compile otherwise)

    import flexattn
    from flexattn.mods import bind

    torch.zeros(1, device=device).sum().item()
    mask_mod = _mask(row, device)
    bind(lambda b, h, q_idx, kv_idx: q_idx + h != kv_idx, "mask", device)
    wait()
    begin = time.perf_counter()
    if device != "cpu":
        _start_compiler()
    start = time.perf_counter() - begin

    def timed() -> tuple[float, Any]:
        begin = time.perf_counter()
        mask = flexattn.create_block_mask(mask_mod, None, None, row.length, row.length, device)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin, mask

    before = _memory(device)
    first, mask = timed()
    seconds = []
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    result = sum(each.numel() * each.element_size() for each in lists)
    counts = [int(each.sum(dtype=torch.int64)) for each in lists[::2]]
    del lists, mask
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        spent, mask = timed()
        seconds.append(spent)
        del mask
    return {
        "first": first,
        "compiler": start,
        "seconds": seconds,
        "beyond": max(0, _memory(device) - before - result),
        "result": result,
        "partial": counts[0],
        "full": counts[1],
    }


def _wait_for_a_line() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


def _start_compiler() -> None:
    """Before its first compile in a process Triton hashes all of its own files."""
    from triton.runtime.cache import triton_key

    triton_key()


def _memory(device: str) -> int:
    """The most bytes held so far: of the GPU's tensors, or of this process."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated()


def _mask(row: Row, device: str) -> Callable[..., Any]:
    import torch

    from flexattn.catalogue import causal, document, natten_2d, prefix_lm, sliding_window

    if row.mask == "causal":
        return causal
    if row.mask == "window":
        return sliding_window(WINDOW)
    if row.mask == "natten":
        return natten_2d(CANVAS, row.length // CANVAS, NEAR)
    if row.mask == "prefix":
        return prefix_lm(torch.tensor([PREFIX], device=device))
    starts = torch.randperm(row.length, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(row.length, dtype=torch.int32)
    ids[starts[: DOCUMENTS - 1]] = 1
    return document(ids.cumsum(0, dtype=torch.int32).to(device))


if __name__ == "__main__":
    name, device, rounds = sys.argv[1:]
    chosen = next(row for row in ROWS if row.name == name)
    print(json.dumps(run(chosen, device, int(rounds), _wait_for_a_line)))
