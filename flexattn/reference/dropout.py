"""Which weights dropout keeps, in torch: the bits that kernels make, for the same seed.

`templates/base/dropout.jinja` says the same in Triton and Gluon: a change here is a change there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.problem.dropout import Dropout

# What passes BigCrush with the fewest rounds (Salmon et al., SC11); FlashAttention takes as many.
_ROUNDS = 7
_WORD = 2**32 - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = _ROUNDS
) -> tuple[Tensor, ...]:
    """Four random words for four words of counter and two of key.

    All are int64 tensors of numbers below 2^32, which broadcast.
    Method: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11).
    """
    return _states(counter, key, rounds)[-1]


def _states(
    words: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int
) -> list[tuple[Tensor, ...]]:
    """The words before each round, and those behind the last one."""
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
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of each call of Philox its four words, and the four that its last two rounds began with.

    All are int64, and broadcast. The seed is in the counter, and the key is 0: a kernel's round
    keys are then constants.
    """
    counter = torch.broadcast_tensors(rows, keys, head + (seed >> 32) & _WORD, seed & _WORD)
    none = torch.zeros_like(seed)
    found = _states(tuple(counter), (none, none), _ROUNDS)
    return found[_ROUNDS], found[_ROUNDS - 2]


def kept_weights(dropout: Dropout, lanes: tuple[Tensor, ...], heads: int) -> Tensor:
    """Of each weight whether it is kept, bool [b, h, m, n].

    lanes: batches, query heads, rows and keys, int64 of one dimension each. heads: query heads.
    One call of Philox has sixteen weights: rows r and r + 8, keys k, k + 1, k + 8, k + 9, k + 16,
    k + 17, k + 24 and k + 25. docs/dropout.md says why these bits.
    """
    assert dropout.seed is not None
    b, h, q, k = lanes
    rows, row = torch.unique(q & ~8, return_inverse=True)
    keys, key = torch.unique(k & ~25, return_inverse=True)
    head = (b[:, None] * heads + h)[..., None, None]
    words, extra = dropout_words(rows[:, None], keys, head, dropout.seed.reshape(()))
    # Of each call: far rows, keys eight further on, bytes: keys sixteen further on, odd keys.
    numbers = torch.stack(
        [
            (word >> shift & 0x7F) << 8 | low >> shift & 0xFF
            for word, low in zip(words, extra, strict=True)
            for shift in (0, 8, 16, 24)
        ],
        -1,
    )
    found = dropout.keeps(numbers).unflatten(-1, (2, 2, 2, 2))  # row 8, key 8, key 16, key 1
    found = found.permute(0, 1, 2, 4, 3, 6, 5, 7).flatten(4).flatten(2, 3)
    found = found.index_select(2, row * 2 + q // 8 % 2)
    kept: Tensor = found.index_select(3, key * 8 + k // 16 % 2 * 4 + k // 8 % 2 * 2 + k % 2)
    return kept
