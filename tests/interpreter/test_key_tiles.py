"""The tiles of keys of packed sequences, in the order in which the backward takes them."""

import random
from itertools import accumulate

import pytest
import torch

from flexattn.catalogue import causal, sliding_window
from flexattn.device import detect
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.ragged import KEY_TILE_WORDS, render_key_tiles
from flexattn.mods import bind
from flexattn.runtime.build import builder
from flexattn.runtime.ragged import packed_backward_problem
from tests.packs import offsets

ROWS, KEYS = 64, 128
CONFIG = HopperBackwardConfig(ROWS, KEYS, 2)
POISON = 10**6
MASKS = {"full": None, "causal": causal, "window": sliding_window(300)}


def listed(q_lens, k_lens, mask, sections, short_last=1):
    """How many tiles there are and how many not short, then the first five words of each."""
    q, k = (torch.empty(sum(lens), 2, 64).bfloat16() for lens in (q_lens, k_lens))
    asked = None, bind(MASKS[mask], "mask")
    form = packed_backward_problem(q, k, k, len(q_lens), *asked, ()).structure
    here = detect(torch.device("cpu"))
    kernel = builder().kernel(render_key_tiles(form, CONFIG, here), here, -1)
    programs = len(q_lens) + 1
    tiles = sum(k_lens) // KEYS + programs
    queries = sum(q_lens) // ROWS + programs
    found = torch.full((1 + tiles, KEY_TILE_WORDS), POISON, dtype=torch.int32)
    rows = torch.full((queries, 2), POISON, dtype=torch.int32)
    given = {
        "CU_SEQLENS": offsets(q_lens), "CU_SEQLENS_K": offsets(k_lens), "KEY_TILES": found,
        "ROW_TILES": rows,
    }  # fmt: skip
    fixed = {
        "q_len": sum(q_lens), "kv_len": sum(k_lens), "num_requests": programs, "num_tiles": tiles,
        "num_queries": queries, "kv_units": 2, "section_heads": 1 if sections else 2,
        "short_last": short_last,
    }  # fmt: skip
    kernel.prepare(programs, fixed, tuple(given), spare=tuple(fixed)).launch(
        -1, tuple(given.values())
    )
    assert (rows != POISON).all()
    # Places that are left have no key and no row.
    left = found[1 + found[0, 0] :]
    assert (left[:, 3] == sum(k_lens)).all()
    assert (left[:, [2, 6, 8, 9, 10]] == 0).all()
    return found[0, :2].tolist(), found[1 : 1 + found[0, 0], :6].tolist()


def in_order(q_lens, k_lens, mask, sections):
    """The same by sorting."""
    longest = min(max(q_lens), KEYS + 300) if mask == "window" else max(q_lens)
    tiles = []
    for b, (q, k) in enumerate(zip(q_lens, k_lens, strict=True)):
        for start in range(0, k, KEYS):
            left = q if mask == "full" else q - start
            by_left = not sections and mask != "full"
            key = (-left, b) if by_left else (left <= longest // 8, -q, b)
            tiles.append((*key, start, b, left > longest // 8))
    tiles.sort()
    return [len(tiles), sum(each[-1] for each in tiles)], [(each[-2], each[-3]) for each in tiles]


DRAWN = random.Random(5)
PACKS = {
    "equal": ([256] * 5, [256] * 5),
    "one": ([900], [900]),
    "more than a program ranks at a time": ([9000, 30], [9000, 30]),
    "empty": ([0, 130, 0, 1], [0, 130, 0, 1]),
    "other keys": ([40, 700, 1, 0], [900, 20, 300, 7]),
    "many": (lens := [DRAWN.choice((1, 64, 1000, DRAWN.randrange(500))) for _ in range(70)], lens),
}


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pack", PACKS)
def test_order(pack, mask, sections):
    """Short tiles are the last; where all heads start side by side, the longest are the first."""
    q_lens, k_lens = PACKS[pack]
    counts, found = listed(q_lens, k_lens, mask, sections)
    wanted, places = in_order(q_lens, k_lens, mask, sections)
    assert counts == wanted
    first_q, first_k = ([*accumulate(lens, initial=0)] for lens in (q_lens, k_lens))
    tiles = [(b, start, k_lens[b], first_k[b], first_q[b]) for b, start in places]
    assert [tuple(each[:5]) for each in found] == tiles


def test_short_tiles_stay_with_their_sequence_where_rows_of_two_sections_leave_l2():
    q_lens, _ = PACKS["empty"]
    counts, found = listed(q_lens, q_lens, "causal", True, short_last=0)
    assert counts == [3, 3] and [tuple(each[:2]) for each in found] == [(1, 0), (1, 128), (3, 0)]
