"""The tiles of rows of a batch of requests, as the device lists them before attention."""

import random
from itertools import accumulate

import pytest
import torch

from flexattn.device import detect
from flexattn.kernels.hopper.ragged import ragged_defaults, render_row_tiles
from flexattn.problem.serving import DECODE_QUERIES
from flexattn.runtime.build import builder
from flexattn.serving.kernels import in_phase
from tests.problems import served

GROUP, HEADS, ROWS, KEYS = 4, 2, 32, 128
POISON = 10**6


def listed(q_lens, kv_lens, phase="prefill", capacity=None, cu=None, sms=132, ragged=True):
    """(request, first row) of each tile, in their order; and which requests are prefills."""
    B, max_keys, total = len(q_lens), 2**20, sum(q_lens)
    sizes = (1, total) if ragged else (q_lens[0], 0)
    problem = served(
        B, *sizes, max_keys, HEADS * GROUP, HEADS, 128, 128, torch.bfloat16, torch.bfloat16, 16
    )
    problem = in_phase(problem, phase)
    form, config = problem.structure, next(ragged_defaults(problem))
    assert (config.BLOCK_M, config.BLOCK_N) == (ROWS, KEYS)
    target = detect(torch.device("cpu"))
    kernel = builder().kernel(render_row_tiles(form, config, target), target, -1)
    capacity = sum(-(-n // ROWS) for n in q_lens) if capacity is None else capacity
    tiles = torch.full((2 + 2 * capacity + 64,), POISON, dtype=torch.int32)
    counter = torch.full((1,), POISON, dtype=torch.int32)
    prefills = torch.full((B + 1,), POISON, dtype=torch.int32)
    given = {
        "SEQ_LENS": torch.tensor(kv_lens, dtype=torch.int32),
        "ROW_TILES": tiles, "COUNTER": counter,
    }  # fmt: skip
    fixed = {"num_requests": B, "max_keys": max_keys, "capacity": capacity}
    if ragged:
        ends = cu or [*accumulate(q_lens, initial=0)]
        given["CU_SEQLENS"] = torch.tensor(ends, dtype=torch.int32)
        fixed["total_q"] = total
    else:
        fixed["q_rows"] = q_lens[0]
    if phase:
        given["PREFILLS"] = prefills
        fixed["num_sms"] = sms
    kernel.prepare(B, fixed, tuple(given)).launch(-1, tuple(given.values()))
    assert counter.item() == 0 and prefills[B] == POISON
    count = tiles[0].item()
    assert (tiles[2 + 2 * capacity :] == POISON).all()
    found = [tuple(each) for each in tiles[2 : 2 + 2 * count].view(-1, 2).tolist()]
    return found, prefills[:B].bool().tolist() if phase else [True] * B


def prefills_of(q_lens, kv_lens, sms=132):
    """Which requests Hopper's forward serves: those that the streaming kernel serves in more time,
    and whose keys do not keep one SM busy behind all others."""
    own = [
        -(-q // ROWS) * -(-k // KEYS) * HEADS if q > DECODE_QUERIES else 0
        for q, k in zip(q_lens, kv_lens, strict=True)
    ]
    share = sum(own) / sms
    found = []
    for q, k, mine in zip(q_lens, kv_lens, own, strict=True):
        keys = -(-k // KEYS)
        streamed = 1.35 * HEADS * -(-q * GROUP // 64) * keys
        found.append(0 < mine <= streamed and keys <= share + streamed / sms)
    return found


def expected(q_lens, kv_lens, prefills):
    """The same, sorted by where a tile ends among its request's positions."""
    found = [
        (-(max(k - q, 0) + first + ROWS), b, first)
        for b, (q, k, holds) in enumerate(zip(q_lens, kv_lens, prefills, strict=True))
        for first in range(0, q, ROWS)
        if holds
    ]
    return [each[1:] for each in sorted(found)]


BATCHES = {
    "one": ([300], [1000]),
    "decodes alone": ([1, 16, 1], [9, 90, 900]),
    "equal": ([256] * 5, [512] * 5),
    "an end in common": ([128, 256], [384, 384]),
    "mixed": ([1, 700, 17, 0, 129, 1], [5000, 700, 17, 40, 3000, 1]),
    "one has far more keys": ([40] * 8, [60000, *[500] * 7]),
    "more rows than keys": ([200, 90], [0, 40]),
    "more tiles than a program ranks at a time": ([64 * ROWS + 70, 300], [9000, 12000]),
}


@pytest.mark.parametrize("sms", [1, 32, 132])
@pytest.mark.parametrize("batch", BATCHES)
def test_order(batch, sms):
    found, prefills = listed(*BATCHES[batch], sms=sms)
    assert prefills == prefills_of(*BATCHES[batch], sms)
    assert found == expected(*BATCHES[batch], prefills)


def test_a_request_that_would_keep_one_sm_busy_is_streamed():
    batch = BATCHES["one has far more keys"]
    assert prefills_of(*batch, 32) == [False, *[True] * 7]


def test_all_are_prefills_where_a_plan_says_so():
    batch = [130] * 3, [700, 0, 130]
    found, _ = listed(*batch, phase="", ragged=False)
    assert found == expected(*batch, [True] * 3)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_batches(seed):
    draw = random.Random(seed)
    count = draw.choice((3, 64, 65, 130))
    q_lens = [draw.choice((0, 1, 16, 17, draw.randrange(1, 400))) for _ in range(count)]
    kv_lens = [n + draw.choice((0, 0, draw.randrange(2000))) for n in q_lens]
    found, prefills = listed(q_lens, kv_lens, sms=8)
    assert prefills == prefills_of(q_lens, kv_lens, 8)
    assert found == expected(q_lens, kv_lens, prefills)


def test_more_tiles_than_were_planned_for():
    """Of requests whose rows overlap, against the rules, nothing is written behind the last."""
    found, _ = listed([256, 256], [256, 256], capacity=3, cu=[0, 512, 0], sms=1)
    assert len(found) == 3
    found, _ = listed([300, 300, 300], [900] * 3, capacity=4, cu=[0, 900, 0, 900], sms=1)
    assert len(found) == 4
