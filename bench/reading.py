"""A kernel that reads the blocks that were chosen and computes nothing: the floor of sparse calls.

Its programs are those of a forward: of blocks of rows one for each query head, eight heads at a
time and their last rows first; of single rows one for each key head, whose group shares a tile,
and one head after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

READING = "reading"
# Heads side by side, as in the forward's order "sections".
SECTION = 8


@triton.jit
def read_chosen(
    K, V, NUM, IDX, FULL_NUM, FULL_IDX, OUT, heads, group, blocks, width, kv_len,
    SECTION: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    # K, V int32 [key heads, kv_len, WORDS]: two numbers of 16 bits in a word.
    pid = tl.program_id(0)
    section = pid // (SECTION * blocks)
    beside = tl.minimum(SECTION, heads - section * SECTION)
    row = blocks - 1 - pid % (SECTION * blocks) // beside
    head = section * SECTION + pid % (SECTION * blocks) % beside
    line = (head // group) * blocks + row
    base = (head // group).to(tl.int64) * kv_len * WORDS
    masked = tl.load(NUM + line)
    listed = masked + tl.load(FULL_NUM + line)
    keys = tl.arange(0, UNIT)
    words = tl.arange(0, WORDS)
    found = tl.zeros([UNIT, WORDS], tl.int32)
    for i in range(listed):
        entry = tl.where(i < masked, IDX + line * width + i, FULL_IDX + line * width + i - masked)
        first = tl.load(entry) * UNIT
        inside = (first + keys < kv_len)[:, None]
        place = base + (first + keys).to(tl.int64)[:, None] * WORDS + words[None, :]
        found ^= tl.load(K + place, mask=inside, other=0)
        found ^= tl.load(V + place, mask=inside, other=0)
    tl.store(OUT + pid, tl.xor_sum(tl.xor_sum(found, 1), 0))


def reading(
    k: Tensor, v: Tensor, lists: tuple[Tensor, ...], unit: int, heads: int, section: int = SECTION
) -> Callable[[], Tensor]:
    """Read blocks of `unit` keys of k and v [1, Hkv, kv_len, D], of 16 bits, for `heads` heads.

    section: heads side by side.

    lists: counts [1, Hkv, blocks of rows] and indices [..., k] of the blocks that are masked,
    then of full ones. What is returned, int32 [programs], depends on each word.
    """
    num, idx = lists[:2]
    _, Hkv, blocks = num.shape
    words = k.shape[3] // 2
    flat = [x.contiguous().view(torch.int32) for x in (k, v)]
    out = torch.empty(heads * blocks, dtype=torch.int32, device=k.device)

    def call() -> Tensor:
        read_chosen[(heads * blocks,)](
            *flat, num, idx, *lists[2:4], out, heads, heads // Hkv, blocks, idx.shape[3],
            k.shape[2], SECTION=section, UNIT=unit, WORDS=words, num_warps=4,
        )  # fmt: skip
        return out

    return call
