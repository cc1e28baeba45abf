"""The decision: a pure function of samples, sure only where it may be."""

import itertools
import math
import random

import pytest
from hypothesis import given, strategies as st

from flexattn.kernels.triton.config import PrefillConfig
from flexattn.records.record import Failed, Trial
from flexattn.tuning.race import EXACT_UP_TO, LOOKS, alpha, decide, signed_rank

CONFIG = PrefillConfig(128, 64, 4, 2)


def trial(finals, *, shared=1024, registers=128, failed=None):
    return Trial(CONFIG, registers, 0, shared, finals=tuple(finals), failed=failed)


def around(us, rounds=12, noise=0.002, seed=0):
    """Rounds that share one drift: what pairing takes out."""
    drift, own = random.Random(7), random.Random(seed)
    return [us * (1 + drift.gauss(0, 0.03)) * (1 + own.gauss(0, noise)) for _ in range(rounds)]


def brute(differences):
    """The same p-value by listing every choice of signs."""
    sizes = sorted(abs(d) for d in differences if d)
    rank = {s: (2 * sizes.index(s) + sizes.count(s) + 1) / 2 for s in sizes}
    seen = sum(rank[abs(d)] for d in differences if d > 0)
    ranks = [rank[abs(d)] for d in differences if d]
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    return sum(s >= seen for s in sums) / len(sums)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_the_exact_test_counts_all_signs(differences):
    assert signed_rank(differences) == pytest.approx(brute(differences))


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([], 1.0),
        ([0.0, 0.0], 1.0),
        ([1.0] * 8, 2**-8),
        ([-1.0, -2.0, -3.0], 1.0),
        # Hollander and Wolfe, table 3.1: depression before and after a tranquilizer, p = 0.0195.
        ([0.952, -0.147, 1.022, 0.430, 0.620, 0.590, 0.490, -0.080, 0.010], 10 / 512),
    ],
)
def test_known_p_values(differences, expected):
    assert signed_rank(differences) == pytest.approx(expected, abs=5e-4)


def test_the_normal_approximation_meets_the_exact_one():
    draw = random.Random(3)
    values = [draw.gauss(0.3, 1) for _ in range(EXACT_UP_TO + 1)]
    assert signed_rank(values) == pytest.approx(signed_rank(values[:-1]), abs=0.05)
    assert signed_rank([1.0] * 40) < 1e-8


@pytest.mark.parametrize(
    ("speedup", "winner"), [(0.8, 0), (1.0, 0), (1.015, 0), (1.05, 1), (1.5, 1)]
)
def test_a_challenger_needs_the_margin(speedup, winner):
    decision = decide([trial(around(100)), trial(around(100 / speedup, seed=1))], 0)
    assert decision.winner == winner, decision.why
    assert decision.speedup == (pytest.approx(speedup, rel=0.01) if winner else 1.0)


def test_noise_alone_seldom_wins():
    wins = sum(
        decide([trial(around(100, 20, 0.05, 9 * s + i)) for i in range(5)], 0, margin=1.0).winner
        != 0
        for s in range(200)
    )
    assert wins <= 6, "the error of all looks and challengers together is at most 5 %"


def test_few_rounds_cannot_convince():
    few = [trial([100.0] * 5), trial([50.0] * 5)]
    decision = decide(few, 0)
    assert decision.winner == 0 and "p = " in decision.why
    assert decide([trial([100.0] * 8), trial([50.0] * 8)], 0).winner == 1


def test_the_best_median_wins_and_ties_need_less():
    base = around(100)
    faster = [trial(around(90, seed=1)), trial(around(80, seed=2)), trial(around(80.1, seed=3))]
    assert decide([trial(base), *faster[:2]], 0).winner == 2
    lean = trial(around(80.1, seed=3), shared=512)
    decision = decide([trial(base), *faster[:2], lean], 0)
    assert decision.winner == 3 and "tie" in decision.why
    fewer = trial(around(80.1, seed=3), registers=64)
    assert decide([trial(base), *faster[:2], fewer], 0).winner == 3


def test_failures_and_missing_samples():
    broken = Failed("hang", "Timeout", "10 s")
    assert decide([trial([100.0] * 9), trial([10.0] * 9, failed=broken)], 0).winner == 0
    without = decide([trial([], failed=broken), trial([90.0] * 9), trial([80.0] * 9)], 0)
    assert without.winner == 2 and without.speedup == 0.0 and "hang" in without.why
    alone = decide([trial([100.0] * 9), trial([])], 0)
    assert alone.winner == 0 and alone.p_value == 1.0


@given(st.integers(1, 6), st.floats(0.5, 0.999))
def test_the_error_is_shared_among_looks_and_challengers(challengers, confidence):
    total = alpha(challengers, confidence) * challengers * LOOKS
    assert math.isclose(total, 1 - confidence)


def test_it_is_deterministic_and_ignores_the_order_of_equals():
    trials = [trial(around(100)), *(trial(around(90 + i, seed=i)) for i in range(4))]
    assert decide(trials, 0) == decide(list(trials), 0)
