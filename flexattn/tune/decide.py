"""decide(): which config wins, by a signed-rank test on samples: records can be judged again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flexattn.records.record import Decision, Record, Trial

MARGIN = 1.02
CONFIDENCE = 0.95
# The race looks at its samples at most this often; each look may spend an equal part of the error.
LOOKS = 3
# Challengers this close to the best one tie with it, and the one that needs less wins.
TIE = 1.005


def alpha(challengers: int, confidence: float) -> float:
    """The p-value one challenger must show at one look, so that all of them err rarely enough.

    Bonferroni over looks and challengers: it holds for any stopping rule among LOOKS looks, and
    whatever the challengers have in common.
    """
    return (1 - confidence) / (LOOKS * max(1, challengers))


def speedups(default: Sequence[float], challenger: Sequence[float]) -> list[float]:
    """The default's time over the challenger's, round by round, as far as both were timed."""
    return [a / b for a, b in zip(default, challenger, strict=False)]


def decide(
    trials: Sequence[Trial], default: int, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> Decision:
    """The winner of a race by its finals' samples alone.

    A challenger replaces the default only with a median paired speedup above the margin, and if
    the signed-rank test is sure of that. Of those that do, the best median wins; challengers
    within 0.5 % of it tie, and the tie goes to less shared memory, then fewer registers. Without
    a time of the default, the fastest median wins.
    """
    incumbent = trials[default]
    raced = [
        index
        for index, trial in enumerate(trials)
        if index != default and trial.finals and trial.failed is None
    ]
    if incumbent.failed is not None or not incumbent.finals:
        return _without_default(trials, default, raced, margin, confidence)
    level = alpha(len(raced), confidence)
    medians, p_values = {}, {}
    for index in raced:
        ratios = speedups(incumbent.finals, trials[index].finals)
        medians[index] = statistics.median(ratios)
        p_values[index] = signed_rank([math.log(ratio / margin) for ratio in ratios])
    faster = [i for i in raced if medians[i] > margin and p_values[i] <= level]
    if not faster:
        return Decision(
            default, default, 1.0, min(p_values.values(), default=1.0), margin, confidence,
            _why_not(medians, p_values, margin, level),
        )  # fmt: skip
    best = max(medians[i] for i in faster)
    tied = [i for i in faster if medians[i] * TIE >= best]
    winner = min(tied, key=lambda i: (_needs(trials[i]), -medians[i], i))
    rounds = len(trials[winner].finals)
    why = (
        f"{medians[winner]:.3f}x the default in the median of {rounds} paired rounds, "
        f"above {margin:g}x at p = {p_values[winner]:.2g} (at most {level:.2g})"
    )
    if len(tied) > 1:
        why += f"; of {len(tied)} that tie it needs the least"
    return Decision(
        winner, default, medians[winner], p_values[winner], margin, confidence, why
    )  # fmt: skip


def replay_study(record: Record) -> Decision:
    """The decision made again from a record's own samples, with its margin and confidence."""
    made = record.decision
    return decide(record.trials, made.default, made.margin, made.confidence)


def _needs(trial: Trial) -> tuple[int, int]:
    """Shared memory of a block, and registers of all its threads; Neuron has no threads."""
    return trial.shared_memory, trial.registers * getattr(trial.config, "num_warps", 0)


def _why_not(
    medians: dict[int, float], p_values: dict[int, float], margin: float, level: float
) -> str:
    if not medians:
        return "nothing else reached the finals"
    closest = max(medians, key=lambda i: medians[i])
    text = f"the best of {len(medians)} challengers shows {medians[closest]:.3f}x in the median"
    if medians[closest] <= margin:
        return f"{text}, not above {margin:g}x"
    return f"{text}, but p = {p_values[closest]:.2g} is above {level:.2g}"


def _without_default(
    trials: Sequence[Trial], default: int, raced: list[int], margin: float, confidence: float
) -> Decision:
    """The fastest of the rest; its speedup is 0 because there is nothing to compare it with."""
    if not raced:
        return Decision(
            default, default, 1.0, 1.0, margin, confidence, "nothing reached the finals"
        )
    winner = min(raced, key=lambda i: (statistics.median(trials[i].finals), i))
    failed = trials[default].failed
    reason = "has no time" if failed is None else f"failed ({failed.stage}: {failed.error})"
    why = f"the static default {reason}; the fastest of {len(raced)} others"
    return Decision(winner, default, 0.0, 1.0, margin, confidence, why)


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
