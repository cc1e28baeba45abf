"""Captured divisors past those that are constants, through the real templates, interpreted."""

import pytest
import torch

from flexattn.mods import bind, site
from flexattn.mods.numbers import divisors
from tests.support import KINDS, assert_accurate, block_mask, inputs

pytestmark = pytest.mark.usefixtures("one_constant")
DIVISORS = (1, 8, 7, 2**31 - 1, -3)


@pytest.fixture
def one_constant(monkeypatch):
    monkeypatch.setattr(site, "MAX_CONSTANT_DIVISORS", 1)


def divided(n):
    """Every way to divide, with numerators below zero and above."""

    def score_mod(score, b, h, q_idx, kv_idx):
        away = q_idx - kv_idx
        parts = (away // n % 5, away % n % 7, q_idx // n - kv_idx % n % 3)
        cut = torch.div(away, n, rounding_mode="trunc") % 5 + torch.fmod(away, n) % 4
        return score + 0.125 * (parts[0] + parts[1] - parts[2] % 6 + cut)

    return score_mod


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_divide_by_a_number_of_the_call(kind):
    q, k, v = inputs()
    for n in (11, *DIVISORS):
        assert_accurate(q, k, v, score_mod=divided(n), kernel_options=KINDS[kind])
        assert bool(divisors(bind(divided(n), "score").mod.expr)) is (n not in (11, -3))


def test_masks_that_divide_by_numbers_of_the_call():
    q, k, v = inputs()

    def tiles(width, tile):
        def mask_mod(b, h, q_idx, kv_idx):
            rows = (q_idx // (width * tile) - kv_idx // (width * tile)).abs()
            cols = q_idx % (width * tile) // tile - kv_idx % (width * tile) // tile
            return (rows <= tile) & (cols.abs() <= 1)

        return mask_mod

    for width, tile in ((5, 2), (4, 3), (7, 1), (3, 40)):
        mask_mod = tiles(width, tile)
        assert_accurate(q, k, v, block_mask=block_mask(mask_mod, q, k, 16))
        assert bool(divisors(bind(mask_mod, "mask").mod.expr)) is (width != 5)
