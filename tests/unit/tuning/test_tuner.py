"""tune_subject on replayed studies: what is built, gated, timed, kept and resumed."""

import dataclasses
import math
import statistics

import pytest

from flexattn.errors import MeasureError
from flexattn.records.codec import decode_record, encode_record
from flexattn.records.record import Failed, Gated
from flexattn.tuning.evaluator import NOT_TRIED, Method, method_for
from flexattn.tuning.race import HOPELESS, TrialTable, looks, replay_study
from flexattn.tuning.tuner import tune_subject
from tests.replayed import ReplayMeasurer
from tests.studies import FINE, decode_configs, study

REPLAY = Method(rounds=3)


@pytest.fixture(scope="module")
def stored():
    return study(1, decode_configs()[::3])


class Spy(ReplayMeasurer):
    """Counts what it is asked, and does as told about some configs."""

    def __init__(self, stored, seed=0, verdicts=None, samples=None, stop_after=math.inf):
        super().__init__(stored, seed)
        self.verdicts, self.samples = verdicts or {}, samples or {}
        self.calls, self.stop_after = [], stop_after

    def gate(self, config):
        found = super().gate(config)
        return self.verdicts.get(config) or found

    def sample(self, configs, rounds, min_ms, limit_us=math.inf):
        if len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((tuple(configs), rounds))
        found = super().sample(configs, rounds, min_ms, limit_us)
        return [self.samples.get(c, f) for c, f in zip(configs, found, strict=True)]


def tuned(stored, spy=None, method=REPLAY, **more):
    spy = spy or Spy(stored)
    return tune_subject(stored.subject, spy, spy.build, method, **more), spy


def by_config(record):
    return {trial.config: trial for trial in record.trials}


def test_a_record_says_all_and_can_be_judged_again(stored):
    record, spy = tuned(stored)
    assert record.provenance == "measured" and record.key == stored.key
    assert len(record.trials) == len(stored.trials)
    assert replay_study(record) == record.decision
    again = decode_record(encode_record(record).encode())
    assert again == record and replay_study(again) == record.decision
    assert record.rejected == stored.rejected and record.made and record.tool
    healthy = {t.config for t in stored.trials if t.failed is None}
    assert set(spy.gated) == healthy, "every candidate that can run is gated, and no other is"


def test_every_batch_is_timed_beside_the_default(stored):
    record, spy = tuned(stored, method=dataclasses.replace(REPLAY, batch=6))
    default = record.trials[record.decision.default]
    assert all(default.config == configs[0] for configs, _ in spy.calls)
    timed = [t for t in record.trials if t.screening and t is not default]
    near = [t for t in timed if len(t.screening) > 1]  # one far off keeps a round
    assert {t.start % REPLAY.rounds for t in near} == {0}
    assert len({t.start // REPLAY.rounds for t in timed}) > 1
    assert all(len(default.screening) >= t.start + len(t.screening) for t in timed)


def test_the_winner_is_near_the_best(stored):
    record, _ = tuned(stored)
    true = {c: cost(stored, c) for c in stored.subject.configs}
    assert true[record.config] <= 1.03 * min(true.values())


def cost(stored, config):
    trial = next(t for t in stored.trials if t.config == config)
    if not trial.screening:
        return math.inf
    base = stored.trials[stored.default].screening[trial.start :]
    return statistics.median(a / b for a, b in zip(trial.screening, base, strict=False))


def test_twins_are_timed_once(stored):
    trials = list(stored.trials)
    trials[1] = dataclasses.replace(trials[1], failed=None, screening=trials[0].screening[:12])
    # Twins are launched alike; fields that only the code sees may differ.
    twin = dataclasses.replace(trials[1].config, num_stages=8)
    trials[2] = dataclasses.replace(
        trials[2], config=twin, same_code_as=1, failed=None, screening=(), shared_memory=1 << 16
    )
    trials[1] = dataclasses.replace(trials[1], shared_memory=1 << 16)
    record, spy = tuned(dataclasses.replace(stored, trials=tuple(trials)))
    found = by_config(record)[trials[2].config]
    assert record.trials[found.same_code_as].config == trials[1].config
    assert not found.screening and trials[2].config not in spy.measured + spy.gated


@pytest.mark.parametrize(
    "verdict",
    [Gated("out", 1.0, 0.1, 0.05, False), Failed("crash", "IllegalAccess", "x" * 9000)],
)
def test_what_the_gate_refuses_is_never_timed(stored, verdict):
    best = min(stored.subject.configs, key=lambda c: cost(stored, c))
    record, spy = tuned(stored, Spy(stored, verdicts={best: verdict}))
    assert best not in spy.measured and record.config != best
    failed = by_config(record)[best].failed
    assert failed.stage in ("gate", "crash") and len(failed.message) < 1000


def test_the_default_runs_though_it_spills_and_need_not_run_at_all(stored):
    default = stored.trials[stored.default]
    spills = Failed("resources", "Spills", "many")

    class Starved(Spy):
        def build(self, configs):
            found = super().build(configs)
            return [
                dataclasses.replace(b, failed=spills) if b.config == default.config else b
                for b in found
            ]

    record, _ = tuned(stored, Starved(stored))
    assert by_config(record)[default.config].screening
    hang = Failed("hang", "Timeout", "10 s")
    record, _ = tuned(stored, Spy(stored, verdicts={default.config: hang}))
    assert record.decision.speedup == 0.0 and record.config != default.config
    assert replay_study(record) == record.decision


def test_nothing_that_runs_is_an_error(stored):
    broken = dict.fromkeys(stored.subject.configs, Failed("crash", "Dead", "gone"))
    with pytest.raises(MeasureError, match="Dead"):
        tuned(stored, Spy(stored, verdicts=broken))


def test_a_failure_in_the_finals_leaves_the_race(stored):
    record, _ = tuned(stored)
    lost = record.config
    late = Failed("hang", "Timeout", "late")

    class Late(Spy):
        def sample(self, configs, rounds, min_ms, limit_us=math.inf):
            found = super().sample(configs, rounds, min_ms, limit_us)
            final = rounds not in (REPLAY.rounds,)
            return [
                late if final and c == lost else f for c, f in zip(configs, found, strict=True)
            ]

    record, _ = tuned(stored, Late(stored))
    assert record.config != lost and by_config(record)[lost].failed == late


@pytest.mark.parametrize("us", [0.0, -2.0, math.nan, math.inf, 1e-5])
@pytest.mark.parametrize(
    ("whose", "final"),
    [
        ("another", False),
        ("winner", False),
        ("default", False),
        ("winner", True),
        ("default", True),
    ],
)
def test_a_sample_that_is_no_time_is_a_failure_of_its_config(stored, whose, final, us):
    """A sample of 0 or below raised ZeroDivisionError, or a domain error, through the campaign."""
    default, winner = stored.subject.configs[stored.default], tuned(stored)[0].config
    healthy = [t.config for t in stored.trials if t.failed is None]
    another = next(each for each in healthy if each not in (default, winner))
    bad = {"another": another, "winner": winner, "default": default}[whose]

    class Timeless(Spy):
        def sample(self, configs, rounds, min_ms, limit_us=math.inf):
            found = super().sample(configs, rounds, min_ms, limit_us)
            if (rounds != REPLAY.rounds) != final:
                return found
            pairs = zip(configs, found, strict=True)
            return [(*f[:1], us, *f[2:]) if c == bad else f for c, f in pairs]

    record, _ = tuned(stored, Timeless(stored))
    failed = by_config(record)[bad].failed
    assert (failed.stage, failed.error) == ("run", "NoTime") and f"{us:g} us" in failed.message
    assert record.config != bad and replay_study(record) == record.decision
    assert decode_record(encode_record(record).encode()) == record


def test_hopeless_candidates_stop_early():
    slow = study(3, decode_configs()[:40], base_us=10.0)
    trials = list(slow.trials)
    for i, trial in enumerate(trials[20:], 20):
        trials[i] = dataclasses.replace(trial, screening=tuple(9 * us for us in trial.screening))
    slow = dataclasses.replace(slow, trials=tuple(trials))
    record, _ = tuned(slow, method=dataclasses.replace(REPLAY, batch=5))
    best = statistics.median(record.trials[record.decision.winner].screening)
    counts = {len(t.screening) for t in record.trials[25:] if t.screening}
    hopeless = [
        t for t in record.trials[25:] if t.screening and t.screening[0] > 1.1 * HOPELESS * best
    ]
    assert hopeless and all(len(t.screening) == 1 for t in hopeless), counts


def test_the_budget_ends_the_search_and_counts_what_was_not_tried(stored, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flexattn.tuning.evaluator.time.monotonic", lambda: now[0])

    class Slow(Spy):
        def sample(self, configs, rounds, min_ms, limit_us=math.inf):
            now[0] += len(configs)
            return super().sample(configs, rounds, min_ms, limit_us)

    record, _ = tuned(stored, Slow(stored), dataclasses.replace(REPLAY, budget_s=20, batch=5))
    untried = dict(record.rejected)[NOT_TRIED]
    assert untried + len(record.trials) == len(stored.trials) and untried > 10
    assert replay_study(record) == record.decision


def test_seeds_come_first(stored):
    seeds = [stored.subject.configs[i] for i in (30, 20)]
    _, spy = tuned(stored, method=dataclasses.replace(REPLAY, batch=3), seeds=seeds)
    first = spy.calls[0][0]
    assert first[0] == stored.trials[stored.default].config
    assert {c for c in seeds if cost(stored, c) < math.inf} <= set(first)


@pytest.mark.parametrize("rounds", [1, 7, 8, 9, 12, 20, 40])
def test_looks_are_few_and_end_with_the_rounds(rounds):
    found = looks(rounds)
    assert found == sorted(found) and found[-1] == rounds and len(found) <= 3
    assert found[0] >= min(rounds, 8)


def test_efforts():
    assert method_for("quick").budget_s <= 10
    assert method_for("exhaustive").all_up_to > 10**6
    assert FINE.passed and method_for("full", 60).budget_s == 60


def test_a_failure_names_files_without_the_folders_of_the_machine_that_had_it():
    """A shipped record told in which folder of a rented machine a kernel had not compiled."""
    table = TrialTable(decode_configs()[:1], 0)
    said = "no /home/me/.cache/kernels/kernel_1.py for sm_90: /opt/bin/ptxas 1/2, https://a.b/c/d"
    table.fail(0, Failed("build", "PTXASError", said))
    kept = "no kernel_1.py for sm_90: ptxas 1/2, https://a.b/c/d"
    assert table.trials[0].failed.message == kept


def test_what_is_refused_for_good_is_counted():
    """It was one of the failures to build, among kernels that a killed compiler had left."""
    table = TrialTable(decode_configs()[:3], 0)
    table.fail(0, Failed("infeasible", "CompilationError", "sigmoid is not defined"))
    table.fail(1, Failed("build", "PTXASError", "killed"))
    assert table.infeasible == 1
