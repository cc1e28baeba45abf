"""FLEXATTN_CHECK=1: a read outside of a captured tensor is an error that says all about it."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import flexattn
from flexattn.catalogue import causal, sliding_window
from flexattn.errors import CaptureError
from flexattn.problem import read_checks
from flexattn.settings import override
from tests.support import block_mask, inputs

SHORT = 40
BIAS, TABLE = torch.linspace(-1, 1, SHORT), torch.ones(3, 9)
IDS = torch.zeros(SHORT, dtype=torch.int32)
ROWS = torch.arange(53) % 7
BIASES = [BIAS, TABLE]


@pytest.fixture(autouse=True)
def checked():
    with override(check=True):
        yield


def by_key(score, b, h, q_idx, kv_idx):
    return score + BIAS[kv_idx]


def by_distance(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx - kv_idx]


def by_argument(table, score, b, h, q_idx, kv_idx):
    return score + table[kv_idx]


def by_score(score, b, h, q_idx, kv_idx):
    return score + BIAS[(score * 20).int()]


def by_table(score, b, h, q_idx, kv_idx):
    return score + BIAS[ROWS[kv_idx] * 9]


def of_list(score, b, h, q_idx, kv_idx):
    return score + BIASES[0][kv_idx]


def by_batch(score, b, h, q_idx, kv_idx):
    return score + TABLE[b + 2, h]


OUTSIDE = {
    "key": (
        by_key,
        r"'by_key' .* reads BIAS, float32\[40\], at 40 in dimension 0, .* kv_idx=40\n",
    ),
    "distance": (
        by_distance,
        r"TABLE, float32\[3, 9\], at -10 in dimension 1, which has 9 .* q_idx=0, kv_idx=10\n",
    ),
    "partial": (partial(by_argument, BIAS), r"reads table, "),
    "closure": (lambda s, b, h, m, n, bias=BIAS: s + bias[n], r"reads bias, "),
    "score": (by_score, r"reads a captured tensor out of range at b=0, "),  # by plain torch
    "table": (by_table, r"at 45 in dimension 0, .* kv_idx=5\n"),
    "list": (of_list, r"reads BIAS"),
    "batch": (by_batch, r"at 3 in dimension 0, which has 3 elements, at b=1, "),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_score_mod_that_reads_outside(name):
    """A table that is too short was read as 0 by kernels, and nobody heard of it."""
    score_mod, says = OUTSIDE[name]
    with pytest.raises(CaptureError, match=says):
        flexattn.flex_attention(*inputs(), score_mod, enable_gqa=True)


@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [
        (by_key, lambda b, h, q_idx, kv_idx: (kv_idx < SHORT) & (q_idx >= 0)),
        (by_distance, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 9)),
        (lambda s, b, h, m, n: s + BIAS[n.clamp(max=SHORT - 1)], causal),
        (lambda s, b, h, m, n: s + BIAS[-1 - n % SHORT], causal),
        (lambda s, b, h, m, n: s + BIAS[(s * 1000).int() % SHORT], causal),
        (None, lambda b, h, q_idx, kv_idx: (kv_idx < SHORT) & (IDS[kv_idx] == 0)),
        (None, lambda b, h, q_idx, kv_idx: ~((kv_idx >= SHORT) | (IDS[kv_idx] != 0))),
        (None, lambda b, h, m, n: torch.where(n < SHORT, IDS[n] == 0, False)),
        (None, lambda b, h, q_idx, kv_idx: IDS[kv_idx - SHORT] == 0),
    ],
    ids="rows beyond|window|clamped|wrapped|of scores|and|or|where|negative".split("|"),
)
def test_reads_that_do_not_count(score_mod, mask_mod):
    """Removed positions may read anything, and a mask may where it is False whatever it reads."""
    q, k, v = inputs()
    mask = block_mask(mask_mod, q, k, 16)
    out = flexattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx],
        lambda b, h, q_idx, kv_idx: IDS[kv_idx] > 0,
        lambda b, h, q_idx, kv_idx: (kv_idx < SHORT + 1) & (IDS[kv_idx] > 0),
        lambda b, h, q_idx, kv_idx: (kv_idx >= SHORT) | (IDS[kv_idx] > 0),
        lambda b, h, q_idx, kv_idx: torch.where(IDS[kv_idx] > 0, kv_idx < 0, kv_idx < 1),
    ],
    ids=["documents", "nowhere true", "one beyond", "or", "choice"],
)
def test_a_mask_mod_that_reads_outside(mask_mod):
    """Read as 0, a position beyond the table may be removed for no reason."""
    q, k, v = inputs()
    says = r"mask_mod '<lambda>' .* reads IDS, int32\[40\], at 4\d in dimension 0"
    with pytest.raises(CaptureError, match=says):
        block_mask(mask_mod, q, k, 16)
    counts = torch.full((1, 1, 3), 4, dtype=torch.int32)
    every = torch.arange(4, dtype=torch.int32).expand(1, 1, 3, 4)
    mask = BlockMask.from_kv_blocks(
        counts, every, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(37, 53)
    )
    with pytest.raises(CaptureError, match=says):
        flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def test_a_mask_is_asked_in_its_partial_blocks_alone():
    q, k, v = inputs()
    mask = block_mask(sliding_window(9), q, k, 16)
    ids = torch.zeros(48)  # the block behind them is in no list
    mask.mask_mod = lambda b, h, q_idx, kv_idx: ids[kv_idx] == 0
    flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def test_slices_change_nothing(monkeypatch):
    monkeypatch.setattr(read_checks, "_CHUNK", 53 * 5)
    with pytest.raises(CaptureError, match=r"at -10 .* h=0, q_idx=0, kv_idx=10\n"):
        flexattn.flex_attention(*inputs(), by_distance, enable_gqa=True)


def test_what_bounds_prove_is_not_looked_at(monkeypatch):
    """Neither the positions nor the block lists, whose map may be large."""
    table, offset = torch.zeros(3, 60), 7
    q, k, v = inputs()
    mask = block_mask(lambda b, h, q_idx, kv_idx: table[h, kv_idx + offset] == 0, q, k, 16)
    monkeypatch.setattr(read_checks, "_chunks", None)
    monkeypatch.setattr(read_checks, "block_maps", None)
    for offset in (7, 5):  # what is captured twice is a run-time number

        def score_mod(s, b, h, m, n, offset=offset):
            return s + table[h, n + offset] + table[h, m - n]

        flexattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)


def test_the_cpu_path_raises_without_it_too():
    with override(check=False), pytest.raises(CaptureError, match="FLEXATTN_CHECK=1"):
        flexattn.flex_attention(*inputs(), by_key, enable_gqa=True)
