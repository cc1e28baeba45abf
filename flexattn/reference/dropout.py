"""The weights that dropout keeps, in torch: the bits that kernels make, for the same seed.

`templates/base/dropout.jinja` says the same in Triton and Gluon: a change here is a change there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.problem.inputs import Dropout

# What passes BigCrush with the fewest rounds (Salmon et al., SC11); FlashAttention takes as many.
_ROUNDS = 7
_WORD = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(
    words: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = _ROUNDS
) -> list[tuple[Tensor, ...]]:
    """Four words of counter, and what each round makes of them with two words of key.

    All are int64 tensors of numbers below 2^32, which broadcast. Random are those of the last.
    Method: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11).
    """
    c0, c1, c2, c3 = words
    k0, k1 = key
    found = [words]
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _product(c0, 0), _product(c2, 1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
        found.append((c0, c1, c2, c3))
    return found


def _product(word: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """High and low words of the product with a multiplier; int64 wraps round as uint64 does."""
    product = word * _MULTIPLIERS[place]
    return product >> 32 & _WORD, product & _WORD


def dropout_words(
    rows: Tensor, keys: Tensor, head: Tensor, seed: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """For each call of Philox its four words, the four that its last two rounds began with, and
    the first one of the round before.

    All are int64, and broadcast. The seed is in the counter, and the key is 0: a kernel's round
    keys are then constants.
    """
    counter = torch.broadcast_tensors(rows, keys, head + (seed >> 32) & _WORD, seed & _WORD)
    none = torch.zeros_like(seed)
    *_, (shared, *_), extra, _, words = philox4x32(tuple(counter), (none, none))
    return words, extra, shared


def dropout_numbers(rows: Tensor, keys: Tensor, head: Tensor, seed: Tensor) -> Tensor:
    """The numbers of a call's 32 weights, int64, by their places in its words, behind the rest."""
    words, extra, shared = dropout_words(rows, keys, head, seed)
    places = torch.arange(32, device=rows.device)
    numbers = (shared >> 25)[..., None]
    for bit, word in enumerate(reversed((*words, *extra)), 7):
        numbers = numbers + ((word[..., None] >> places & 1) << bit)
    return numbers


def kept_weights(dropout: Dropout, lanes: tuple[Tensor, ...], heads: int) -> Tensor:
    """True for each weight that is kept, bool [b, h, m, n].

    lanes: batches, query heads, rows and keys, int64 of one dimension each. heads: query heads.
    One call of Philox has 32 weights: rows r and r + 8, keys k, k + 1, and those that are 8, 16, …
    56 further on. Each has a bit of every word, at one place, a number of five bits: from the
    highest one, the key's bits 4, 0 and 5, the row's bit 3 and the key's bit 3. docs/dropout.md
    says why these bits.
    """
    assert dropout.seed is not None
    b, h, q, k = lanes
    rows, row = torch.unique(q & ~8, return_inverse=True)
    keys, key = torch.unique(k & ~57, return_inverse=True)
    head = (b[:, None] * heads + h)[..., None, None]
    numbers = dropout_numbers(rows[:, None], keys, head, dropout.seed.reshape(()))
    found = dropout.keeps(numbers).unflatten(-1, (2, 2, 2, 2, 2))  # key 16, 1, 32, row 8, key 8
    found = found.permute(0, 1, 2, 7, 3, 6, 4, 8, 5).flatten(4).flatten(2, 3)
    found = found.index_select(2, row * 2 + q // 8 % 2)
    kept: Tensor = found.index_select(3, key * 16 + k // 8 % 8 * 2 + k % 2)
    return kept
