"""A random mask's BlockMask, held to the one of the dense mask."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import torch

import flexattn
from flexattn.block_mask.classify import BlockClassifier
from flexattn.mods import bind
from flexattn.settings import current
from tests.random_mods.mods import everywhere, random_mask
from tests.random_mods.outcomes import Outcome, Task, outcome

CPU = torch.device("cpu")
BLOCKS = (16, 16, 32, 64, 128, 7, (16, 64), (64, 16), (48, 40))
# One in so many goes through the kernel too, where a process interprets: a small one.
SHARE, SHORT = 10, 80


def check_mask(seed: int, index: int, longest: int) -> str:
    """Make a BlockMask and hold its lists to the dense mask's; returns its sizes in words.

    Raises AssertionError where they differ, and what flexattn raises.
    """
    draw = random.Random(f"{seed} {index} sizes")
    by_kernel = current().interpret and index % SHARE == 0
    longest = min(longest, SHORT) if by_kernel else longest
    sizes = (draw.choice((1, 2)), draw.choice((1, 2, 3)), *_lengths(draw, longest))
    size = draw.choice(BLOCKS)
    block = size if isinstance(size, tuple) else (size, size)
    separate = draw.random() < 0.9
    mask_mod = random_mask(seed, index).make(*sizes)[1]
    assert mask_mod is not None
    some, every = dense_kinds(everywhere(mask_mod, *sizes), block)
    made = flexattn.create_block_mask(mask_mod, *sizes, CPU, size, separate_full_blocks=separate)
    words = f"{sizes=} {block=} {separate=}"
    full = every if separate else torch.zeros_like(every)
    _same(made.kv_num_blocks, made.kv_indices, some & ~full, f"partial blocks, {words}")
    if separate:
        _same(made.full_kv_num_blocks, made.full_kv_indices, every, f"full blocks, {words}")
    assert torch.equal(made.to_dense().bool(), some), f"to_dense, {words}"
    if by_kernel:
        kinds = torch.full(some.shape, 77, dtype=torch.int8)
        rows = kinds.view(-1, kinds.shape[-1])
        BlockClassifier(bind(mask_mod, "mask"), sizes, block, CPU).run(rows, 0)
        assert torch.equal(kinds, some.to(torch.int8) + every), f"the kernel, {words}"
        words += ", and the kernel"
    return words


def dense_kinds(dense: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of dense [B, H, L, S]: where a block keeps something, and where all of it.

    What lies past a length is not kept.
    """
    B, H, L, S = dense.shape
    rows, cols = -(-L // block[0]), -(-S // block[1])
    padded = dense.new_zeros(B, H, rows * block[0], cols * block[1])
    padded[:, :, :L, :S] = dense
    tiles = padded.view(B, H, rows, block[0], cols, block[1]).transpose(3, 4).flatten(4)
    return tiles.any(-1), tiles.all(-1)


def checked_mask(task: Task) -> Outcome:
    """The same as an outcome."""
    prepared()
    named = task.seed, task.index
    return outcome(task, random_mask(*named), lambda: check_mask(*named, task.longest))


@lru_cache(maxsize=1)
def prepared() -> None:
    """Make the interpreter quick, where this process interprets."""
    torch.set_num_threads(1)
    if current().interpret:
        from tests.quick_interpreter import hurry

        hurry()


def _lengths(draw: random.Random, longest: int) -> tuple[int, int]:
    L, S = (draw.randint(1, longest) for _ in range(2))
    return (draw.choice((1, L)) if draw.random() < 0.1 else L), S


def _same(counts: Any, indices: Any, listed: torch.Tensor, what: str) -> None:
    """torch lists the blocks in order, and then the others in order."""
    order = torch.argsort(listed.int(), dim=-1, descending=True, stable=True)
    assert torch.equal(counts, listed.sum(-1, dtype=torch.int32)), what
    assert torch.equal(indices, order.int()), what
