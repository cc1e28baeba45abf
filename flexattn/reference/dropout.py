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
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _product(c0, 0), _product(c2, 1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _product(word: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """High and low words of the product with a multiplier; int64 wraps round as uint64 does."""
    product = word * _MULTIPLIERS[place]
    return product >> 32 & _WORD, product & _WORD


def kept_weights(dropout: Dropout, lanes: tuple[Tensor, ...], heads: int) -> Tensor:
    """Of each weight whether it is kept, bool [b, h, m, n].

    lanes: batches, query heads, rows and keys, int64 of one dimension each. heads: query heads.
    One call of Philox has eight weights: rows r and r + 8, keys k, k + 1, k + 8 and k + 9.
    """
    assert dropout.seed is not None
    b, h, q, k = lanes
    rows, row = torch.unique(q & ~8, return_inverse=True)
    keys, key = torch.unique(k & ~9, return_inverse=True)
    head = (b[:, None] * heads + h)[..., None, None] & _WORD
    seed = dropout.seed.reshape(())
    words = philox4x32(
        (rows[:, None], keys, head, torch.zeros_like(keys)), (seed & _WORD, seed >> 32 & _WORD)
    )
    # Of each call: far rows, far keys, odd keys.
    halves = torch.stack([x >> shift & 0x7FFF for x in words for shift in (0, 16)], -1)
    found: Tensor = (halves >= dropout.below).unflatten(-1, (2, 2, 2)).permute(0, 1, 2, 4, 3, 5, 6)
    found = found.flatten(4).flatten(2, 3)
    found = found.index_select(2, row * 2 + q // 8 % 2)
    return found.index_select(3, key * 4 + k // 8 % 2 * 2 + k % 2)
