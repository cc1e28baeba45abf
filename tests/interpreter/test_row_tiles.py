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

pytestmark = pytest.mark.interpreter
GROUP, ROWS = 4, 128
POISON = 10**6


def listed(q_lens, kv_lens, phase="prefill", capacity=None, max_keys=2**20, cu=None):
    """(request, first row) of each tile, in their order."""
    problem = served(
        len(q_lens), 1, sum(q_lens), max_keys, 2 * GROUP, 2, 128, 128, torch.bfloat16,
        torch.bfloat16, 16,
    )  # fmt: skip
    form = in_phase(problem, phase).structure
    config = next(ragged_defaults(form))
    assert config.BLOCK_M == ROWS
    target = detect(torch.device("cpu"))
    kernel = builder().kernel(render_row_tiles(form, config, target), target, -1)
    capacity = sum(-(-n // ROWS) for n in q_lens) if capacity is None else capacity
    tiles = torch.full((2 + 2 * capacity + 64,), POISON, dtype=torch.int32)
    counter = torch.full((1,), POISON, dtype=torch.int32)
    given = {
        "SEQ_LENS": torch.tensor(kv_lens, dtype=torch.int32),
        "CU_SEQLENS": torch.tensor(cu or [*accumulate(q_lens, initial=0)], dtype=torch.int32),
        "ROW_TILES": tiles, "COUNTER": counter,
    }  # fmt: skip
    fixed = {
        "num_requests": len(q_lens), "total_q": sum(q_lens), "max_keys": max_keys,
        "capacity": capacity,
    }  # fmt: skip
    kernel.prepare(len(q_lens), fixed, tuple(given)).launch(-1, tuple(given.values()))
    assert counter.item() == 0
    count = tiles[0].item()
    assert (tiles[2 + 2 * capacity :] == POISON).all()
    return [tuple(each) for each in tiles[2 : 2 + 2 * count].view(-1, 2).tolist()]


def expected(q_lens, kv_lens, phase="prefill"):
    """The same, sorted by where a tile ends among its request's positions."""
    found = [
        (-(max(k - q, 0) + first + ROWS), b, first)
        for b, (q, k) in enumerate(zip(q_lens, kv_lens, strict=True))
        for first in range(0, q, ROWS)
        if phase == "" or q > DECODE_QUERIES
    ]
    return [each[1:] for each in sorted(found)]


BATCHES = {
    "one": ([300], [1000]),
    "decodes alone": ([1, 16, 1], [9, 90, 900]),
    "equal": ([256] * 5, [512] * 5),
    "an end in common": ([128, 256], [384, 384]),
    "mixed": ([1, 700, 17, 0, 129, 1], [5000, 700, 17, 40, 3000, 1]),
    "more rows than keys": ([200, 90], [0, 40]),
    "more tiles than a program ranks at a time": ([64 * ROWS + 70, 300], [9000, 12000]),
}


@pytest.mark.parametrize("phase", ["", "prefill"])
@pytest.mark.parametrize("batch", BATCHES)
def test_order(batch, phase):
    assert listed(*BATCHES[batch], phase) == expected(*BATCHES[batch], phase)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_batches(seed):
    draw = random.Random(seed)
    count = draw.choice((3, 64, 65, 130))
    q_lens = [draw.choice((0, 1, 16, 17, draw.randrange(1, 400))) for _ in range(count)]
    kv_lens = [n + draw.choice((0, 0, draw.randrange(2000))) for n in q_lens]
    assert listed(q_lens, kv_lens) == expected(q_lens, kv_lens)


def test_more_tiles_than_were_planned_for():
    """Of requests whose rows overlap, against the rules, nothing is written behind the last."""
    found = listed([256, 256], [256, 256], capacity=3, cu=[0, 512, 0])
    assert len(found) == 3
    found = listed([300, 300, 300], [900, 900, 900], capacity=4, cu=[0, 900, 0, 900])
    assert len(found) == 4
