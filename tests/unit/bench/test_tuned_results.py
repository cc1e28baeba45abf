"""What a winner costs at other sizes, and how often two tunings disagree."""

import dataclasses

import pytest

from bench.tuned_results import flip, flipped, regret
from flexattn.tune.method import Method
from flexattn.tune.replay import ReplayMeasurer
from flexattn.tune.trial_table import cost
from flexattn.tune.tuner import tune_subject
from tests.studies import decode_configs, study

CONFIGS = decode_configs()[:40]


def tuned(number, kv_len=8192, seed=0):
    stored = study(number, CONFIGS)
    key = dataclasses.replace(stored.key, kv_len=kv_len)
    stored = dataclasses.replace(stored, key=key, sizes=(1, 1, kv_len))
    measurer = ReplayMeasurer(stored, seed)
    method = Method(provenance="replay")
    return tune_subject(stored.subject, measurer, measurer.build, method)


def test_regret_is_the_slowdown_beside_the_winner_there():
    there = tuned(2, 16384)
    default, winner = there.decision.default, there.decision.winner
    best = cost(there.trials, winner, default)
    for index, trial in enumerate(there.trials):
        expected = None
        if trial.failed is None:
            own = cost(there.trials, index, default)
            expected = pytest.approx(max(0.0, own / best - 1), abs=1e-4)
        assert regret(trial.config, there) == expected
    assert regret(there.config, there) == 0.0
    assert regret(dataclasses.replace(there.config, BLOCK_N=512), there) is None


def test_a_winner_that_the_other_tuning_did_not_time_is_no_agreement():
    one = tuned(1)

    def won_by_a_stranger(number):
        stranger = dataclasses.replace(one.config, BLOCK_N=number)
        trials = tuple(
            dataclasses.replace(t, config=stranger) if t.config == one.config else t
            for t in one.trials
        )
        return dataclasses.replace(one, trials=trials)

    both = won_by_a_stranger(512), won_by_a_stranger(1024)
    assert flip(one, one) == 0.0 and flip(*both) is None
    assert flipped(None) and flipped(0.031) and not flipped(0.03)


def test_two_tunings_seldom_disagree_by_more_than_three_percent():
    flips = [flip(tuned(n, seed=1), tuned(n, seed=2)) for n in range(20)]
    assert sum(each > 0.03 for each in flips) <= 1, flips
