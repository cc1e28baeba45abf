"""Wilcoxon's signed-rank test, one-sided: whether paired differences lie above zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

# The table of rank sums has n(n + 1) entries; above this the normal approximation is as good.
EXACT_UP_TO = 25


def signed_rank(differences: Sequence[float]) -> float:
    """The chance of rank sums this high, were the differences symmetric about zero or lower.

    Zeros are left out and ties share their mean rank, as in Wilcoxon (1945); the distribution is
    that of the ranks at hand, counted exactly for at most 25 differences, above that a normal one
    with the ties' variance and a continuity correction (Hollander and Wolfe, 1999, section 3.1).
    1.0 where nothing is left.
    """
    kept = [each for each in differences if each]
    if not kept:
        return 1.0
    doubled = _doubled_ranks([abs(each) for each in kept])
    positive = sum(rank for rank, each in zip(doubled, kept, strict=True) if each > 0)
    if len(kept) <= EXACT_UP_TO:
        return _exact(doubled, positive)
    mean = sum(doubled) / 2
    deviation = math.sqrt(sum(rank * rank for rank in doubled)) / 2
    return 0.5 * math.erfc((positive - mean - 1) / (deviation * math.sqrt(2)))


def _doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Twice the rank of each size, ties sharing their mean: doubled, they are integers."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    ranks = [0] * len(sizes)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and sizes[order[end]] == sizes[order[begin]]:
            end += 1
        for position in order[begin:end]:
            ranks[position] = begin + 1 + end
        begin = end
    return ranks


def _exact(doubled: Sequence[int], positive: int) -> float:
    """The share of all 2**n choices of signs whose positive ranks sum to at least this."""
    ways = [1] + [0] * sum(doubled)
    reached = 0
    for rank in doubled:
        reached += rank
        for total in range(reached, rank - 1, -1):
            ways[total] += ways[total - rank]
    share: float = sum(ways[positive:]) / 2 ** len(doubled)
    return share
