"""What a record keeps of trials: of one far off, the round of its median."""

from dataclasses import replace

from flexattn.kernels.triton.config import PrefillConfig
from flexattn.records.record import Failed, Trial
from flexattn.tuning.race import FAR, cost, thinned

TILE = PrefillConfig(128, 64, 4, 3)
DEFAULT = Trial(TILE, screening=(10.0, 10.2, 9.9, 10.1, 10.0, 9.8))


def other(us, start=3, **kwargs):
    return Trial(replace(TILE, num_stages=2), screening=us, start=start, **kwargs)


def test_a_trial_far_off_keeps_its_median_round_and_its_cost():
    far = other((20.3, 20.0, 19.9))
    trials = (DEFAULT, far, other((10.4, 10.1, 9.9)))
    kept = thinned(trials, 0)
    assert kept[0] is DEFAULT and kept[2] is trials[2]
    assert (kept[1].screening, kept[1].start) == ((20.3,), 3)
    assert [cost(kept, i, 0) for i in range(3)] == [cost(trials, i, 0) for i in range(3)]
    assert thinned(kept, 0) == kept


def test_finals_failures_and_untimed_trials_stay():
    far = (30.0, 30.0, 30.0)
    trials = (
        DEFAULT, other(far, finals=(29.0, 29.5)), other((), failed=Failed("run", "x", "")),
        other((), start=0), replace(DEFAULT, config=TILE, screening=(), same_code_as=0),
    )  # fmt: skip
    assert thinned(trials, 0) == trials


def test_without_a_default_the_fastest_is_the_measure():
    trials = (replace(DEFAULT, failed=Failed("run", "x", "")), other((8.0,)), other((8.0 * FAR,)))
    assert thinned(trials, 0) == trials
    assert thinned((), 0) == ()
