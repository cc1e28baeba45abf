"""Dropout's bits: Philox as its authors publish it, the share that is dropped, independence."""

import math

import pytest
import torch

from flexattn.problem.inputs import Dropout
from flexattn.reference.dropout import dropout_numbers, kept_weights, philox4x32

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
    assert tuple(map(int, found[-1])) == words


@pytest.mark.parametrize("p", [0.3, 0.8, 1 / 3])
def test_the_number_of_each_weight(p):
    """As the formula says it, weight by weight: kernels make the same bits from it."""
    seed, below = -(2**62) - 12345, Dropout.of(p).below
    found = mask(p, seed, (2, 3, 37, 143))
    places = [(0, 0, 0, 0), (1, 2, 36, 42), (0, 1, 8, 9), (1, 0, 23, 17), (0, 2, 15, 24),
              (1, 1, 1, 16), (0, 0, 31, 25), (1, 2, 9, 32), (0, 1, 26, 57), (1, 0, 30, 142),
              (0, 0, 5, 64), (0, 0, 6, 103)]  # fmt: skip
    for b, h, q, k in places:
        head = b * 3 + h + (seed >> 32) & WORD
        counter = tuple(map(torch.tensor, (q & ~8, k & ~57, head, seed & WORD)))
        none = torch.tensor(0), torch.tensor(0)
        words, extra, shared = (philox4x32(counter, none, rounds)[-1] for rounds in (7, 5, 4))
        place = k // 16 % 2 * 16 + k % 2 * 8 + k // 32 % 2 * 4 + q // 8 % 2 * 2 + k // 8 % 2
        bits = "".join(str(int(word) >> place & 1) for word in (*words, *extra))
        number = int(bits, 2) * 128 + (int(shared[0]) >> 25)
        assert bool(found[b, h, q, k]) == (number >= below)


@pytest.mark.parametrize("p", [2**-15, 0.1, 0.5, 0.5 + 2**-15, 0.9, 1 - 2**-15, 1.0])
def test_as_many_numbers_drop_as_dropout_p_says(p):
    """Exactly, and what a kernel is told means the same numbers."""
    numbers, dropout = torch.arange(2**15), Dropout.of(p)
    kept = dropout.keeps(numbers)
    assert int((~kept).sum()) == dropout.below
    told = dropout.arguments()["last_dropped"]
    assert torch.equal(numbers > told, kept)
    # Bit by bit, from the lowest ones, as kernels compare.
    above = (numbers & 127) > (told & 127)
    for place in range(7, 15):
        bit = (numbers >> place & 1).bool()
        above = bit & above if told >> place & 1 else bit | above
    assert torch.equal(above, kept)


def test_what_rounds_to_none_drops_nothing():
    assert Dropout.of(0) is None and Dropout.of(2**-17) is None and Dropout.of(2**-15).below == 1


def test_a_slice_has_the_bits_of_the_whole():
    lanes = tuple(torch.arange(a, b) for a, b in ((1, 2), (1, 3), (37, 91), (5, 300)))
    dropout = Dropout.of(0.4)._replace(seed=torch.tensor([5]))
    assert torch.equal(kept_weights(dropout, lanes, 3), mask(0.4)[1:2, 1:3, 37:91, 5:300])


@pytest.mark.parametrize("p", [0.001, 0.01, 1 / 128, 0.1, 13 / 128, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    found = mask(p)
    deviation = math.sqrt(p * (1 - p) / found.numel())
    assert abs((~found).double().mean() - p) < 5 * deviation + 2**-16
    assert mask(1.0).sum() == 0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_weights_are_dropped_independently_of_each_other(p):
    """Neighbours, weights of one call of Philox, other heads, batches and seeds."""
    found = mask(p).double() - (1 - p)
    apart = [(0, 1), (1, 0), (8, 0), (0, 8), (8, 9), (1, -1), (0, 2), (0, 16), (8, 17), (0, 24),
             (0, 25), (0, 32), (8, 40), (0, 57), (0, 64), (16, 0)]  # fmt: skip
    shifts = [*((0, 0, *each) for each in apart), (0, 1, 0, 0), (1, 0, 0, 0)]
    pairs = [(found, found.roll(shift, (0, 1, 2, 3))) for shift in shifts]
    pairs += [(found, mask(p, seed).double() - (1 - p)) for seed in (6, 5 + 2**32, -5)]
    for one, other in pairs:
        correlation = (one * other).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(found.numel())


CALLS = 2**17


@pytest.fixture(scope="module")
def numbers():
    """Those of the 32 weights of each of many calls, int64 [calls, 32]."""
    rows, keys = torch.arange(0, CALLS // 2, 16)[:, None], torch.arange(0, 2048, 64)
    seed = torch.tensor(2**61 + 12345)
    return dropout_numbers(rows, keys, torch.tensor(3), seed).flatten(0, 1)


def test_the_numbers_of_every_place_are_uniform(numbers):
    """By the chi-square of all 2^15, and of two weights' high bits together."""

    def surprise(drawn, size):
        expected = CALLS / size
        found = ((torch.bincount(drawn, minlength=size) - expected) ** 2).sum() / expected
        return abs(found - size + 1) / math.sqrt(2 * size)

    for place in range(32):
        assert surprise(numbers[:, place], 2**15) < 5
        for other in (1, 2, 4, 8, 16):
            both = (numbers[:, place] >> 7) * 256 + (numbers[:, place ^ other] >> 7)
            assert surprise(both, 2**16) < 5


def test_no_bit_of_a_weight_knows_one_of_another(numbers):
    """Nor do those that all of a call share: each bit beside each, of two weights as of one."""
    bits = [(numbers >> place & 1).float() for place in range(7, 15)]
    shared = [(numbers[:, :1] >> place & 1).float() for place in range(7)]
    found = torch.cat([*bits, *shared], 1).T * 2 - 1
    correlation = (found @ found.T / CALLS).fill_diagonal_(0)
    assert len(found) == 32 * 8 + 7
    assert correlation.abs().max() < 5.5 / math.sqrt(CALLS)


@pytest.mark.parametrize("p", [0.1, 13 / 128, 0.5])
def test_how_many_of_a_call_are_dropped(p, numbers):
    """As many as of independent weights, of all, of two, and of two pairs of them."""
    below, weights = Dropout.of(p).below, 32
    share = below / 2**15
    centred = ((numbers < below).double() - share) / math.sqrt(share * (1 - share))
    # What is shared decides of a weight in 256 where the threshold is among its numbers: of two,
    # in 2^-16 of the calls, and then of both.
    low = below % 128 / 128
    pair = low * (1 - low) / 2**16 / (share * (1 - share))
    both = (centred.T @ centred / CALLS).fill_diagonal_(0)
    assert both.abs().max() < 5 / math.sqrt(CALLS) + pair
    spread = math.sqrt((2 + float((centred**4).mean()) / weights) / CALLS)
    variance = (centred.sum(1) ** 2).mean() / weights
    assert abs(variance - 1 - (weights - 1) * pair) < 5 * spread
    pairs = centred[:, ::2] * centred[:, 1::2]
    assert (pairs.T @ pairs / CALLS).fill_diagonal_(0).abs().max() < 6 / math.sqrt(CALLS)
