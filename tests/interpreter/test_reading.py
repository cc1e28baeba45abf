"""The bench's kernel that only reads: every word of what is chosen, and no other."""

from functools import reduce
from operator import xor

import pytest
import torch

from bench.reading import reading
from flexattn import Selection

UNIT, LENGTH = 16, 100


@pytest.mark.parametrize(("rows", "heads"), [(1, 2), (32, 6), (32, 18)])
def test_it_reads_each_word_that_is_chosen(rows, heads):
    draw = torch.Generator().manual_seed(rows + heads)
    Hkv = heads // (1 if rows == 1 else 3)
    k, v = (torch.randn(1, Hkv, LENGTH, 16, generator=draw).bfloat16() for _ in "kv")
    blocks = -(-LENGTH // rows)
    scores = torch.randn(1, Hkv, blocks, -(-LENGTH // UNIT), generator=draw)
    chosen = Selection.from_topk(scores, 3, unit=UNIT, rows=rows, causal=True).indices
    counts = (chosen >= 0).sum(-1, dtype=torch.int32)
    nothing = torch.zeros_like(counts), torch.zeros_like(chosen)
    # Those that are chosen, in front.
    listed = torch.sort(chosen, -1, descending=True).values
    section = 1 if rows == 1 else 8
    found = reading(k, v, (counts, listed, *nothing), UNIT, heads, section)()
    words = (k.view(torch.int32) ^ v.view(torch.int32))[0]
    wanted = []
    for first in range(0, heads, section):
        for row in reversed(range(blocks)):
            for head in range(first, min(first + section, heads)):
                at = head * Hkv // heads
                units = chosen[0, at, row]
                keys = torch.arange(LENGTH) // UNIT
                kept = (keys[:, None] == units[units >= 0]).any(1)
                wanted.append(reduce(xor, words[at][kept].flatten().tolist(), 0))
    assert found.tolist() == wanted
