"""Dropout's bits: Philox as its authors publish it, the share that is dropped, independence."""

import math

import pytest
import torch

from flexattn.problem.dropout import Dropout
from flexattn.reference.dropout import kept_weights, philox4x32

WORD = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# Random123's kat_vectors: counter and key, rounds, words.
KNOWN = [
    ((0,) * 4, (0,) * 2, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ((0,) * 4, (0,) * 2, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((WORD,) * 4, (WORD,) * 2, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (*PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]
SIZES = (2, 3, 256, 384)


def mask(p, seed=5, sizes=SIZES):
    dropout = Dropout.of(p)._replace(seed=torch.tensor([seed]))
    return kept_weights(dropout, tuple(torch.arange(n) for n in sizes), sizes[1])


@pytest.mark.parametrize(("counter", "key", "rounds", "words"), KNOWN)
def test_known_answers(counter, key, rounds, words):
    found = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)), rounds)
    assert tuple(map(int, found)) == words


def test_the_word_and_the_half_of_each_weight():
    """As the formula says it, weight by weight: kernels make the same bits from it."""
    seed, below = -(2**62) - 12345, Dropout.of(0.3).below
    found = mask(0.3, seed, (2, 3, 37, 43))
    key = torch.tensor(seed & WORD), torch.tensor(seed >> 32 & WORD)
    for b, h, q, k in [(0, 0, 0, 0), (1, 2, 36, 42), (0, 1, 8, 9), (1, 0, 23, 17), (0, 2, 15, 24)]:
        counter = tuple(map(torch.tensor, (q & ~8, k & ~9, b * 3 + h, 0)))
        word = philox4x32(counter, key)[(q >> 3 & 1) * 2 + (k >> 3 & 1)]
        assert bool(found[b, h, q, k]) == (int(word) >> 16 * (k & 1) & 0x7FFF >= below)


def test_a_slice_has_the_bits_of_the_whole():
    lanes = tuple(torch.arange(a, b) for a, b in ((1, 2), (1, 3), (37, 91), (5, 300)))
    dropout = Dropout.of(0.4)._replace(seed=torch.tensor([5]))
    assert torch.equal(kept_weights(dropout, lanes, 3), mask(0.4)[1:2, 1:3, 37:91, 5:300])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    found = mask(p)
    deviation = math.sqrt(p * (1 - p) / found.numel())
    assert abs((~found).double().mean() - p) < 5 * deviation + 2**-16
    assert mask(1.0).sum() == 0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_weights_are_dropped_independently_of_each_other(p):
    """Neighbours, weights of one call of Philox, other heads, batches and seeds."""
    found = mask(p).double() - (1 - p)
    shifts = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 8, 0), (0, 0, 0, 8), (0, 0, 8, 9), (0, 0, 1, -1),
              (0, 0, 0, 2), (0, 0, 0, 16), (0, 0, 16, 0), (0, 1, 0, 0), (1, 0, 0, 0)]  # fmt: skip
    pairs = [(found, found.roll(shift, (0, 1, 2, 3))) for shift in shifts]
    pairs += [(found, mask(p, seed).double() - (1 - p)) for seed in (6, 5 + 2**32, -5)]
    for one, other in pairs:
        correlation = (one * other).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(found.numel())
