"""Studies as files, and the replay of one as a measurer."""

import json
import statistics

import pytest

from bench.exhaustive import study_of
from bench.studies import load_study, loads, save
from flexattn.errors import CacheError
from flexattn.records.codec import whole_trials
from flexattn.tuning.evaluator import NOT_TRIED, Method
from flexattn.tuning.race import cost
from flexattn.tuning.tuner import tune_subject
from tests.replayed import ReplayMeasurer
from tests.studies import decode_configs, study

SMALL = study(5, decode_configs()[:24], batch=7)


def test_a_study_survives_its_file(tmp_path):
    path = tmp_path / "nvidia-h200" / "some.json"
    save(SMALL, path)
    assert load_study(path) == SMALL
    text = path.read_text()
    assert len(text.splitlines()) == len(SMALL.trials) + 3, "a line for each config"
    assert [p.name for p in path.parent.iterdir()] == ["some.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "schema"),
        (lambda d: d.update(extra=1), "fields"),
        (lambda d: d.update(default=500), "default"),
        (lambda d: d["trials"][0].pop("screening"), "default"),
        (lambda d: d["trials"][3].update(screening=["fast"]), "number"),
        (lambda d: d["trials"][0]["screening"].__setitem__(3, 0), "above 0"),
        (lambda d: d["trials"][0]["screening"].__setitem__(3, -1.5), "above 0"),
        (lambda d: d["trials"][3].update(same_code_as=1000), "same_code_as"),
        (lambda d: d["trials"][3]["config"].update(BLOCK_M=17), "BLOCK_M"),
        (lambda d: d["trials"][3]["config"].update(type="os.system"), "config"),
        (lambda d: d.pop("policy"), "fields"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path, change, message):
    save(SMALL, tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    data["trials"] = whole_trials(data["trials"])
    change(data)
    with pytest.raises(CacheError, match=message):
        loads(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": NaN}'])
def test_text_that_is_no_study_is_refused(text):
    with pytest.raises(CacheError):
        loads(text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CacheError, match="nothing"):
        load_study(tmp_path / "nothing.json")


def test_a_seed_gives_the_same_times_again():
    configs = SMALL.subject.configs
    one, two, other = (ReplayMeasurer(SMALL, seed) for seed in (1, 1, 2))
    assert one.sample(configs, 4, 1.0) == two.sample(configs, 4, 1.0)
    assert one.sample(configs, 4, 1.0) != other.sample(configs, 4, 1.0)


def test_replayed_times_are_paired_and_keep_their_ratios():
    healthy = [t for t in SMALL.trials if t.screening]
    times = ReplayMeasurer(SMALL, 3).sample([t.config for t in healthy], 400, 1.0)
    base = times[0]
    for trial, got in zip(healthy[1:], times[1:], strict=True):
        paired = SMALL.trials[0].screening[trial.start :]
        stored = statistics.median(a / b for a, b in zip(trial.screening, paired, strict=False))
        ratios = [a / b for a, b in zip(got, base, strict=True)]
        assert statistics.median(ratios) == pytest.approx(stored, rel=0.01)
        assert statistics.pstdev(ratios) < 0.02, "rounds drift together"


def test_failures_and_strangers_are_values():
    broken = next(t for t in SMALL.trials if t.failed)
    stranger = decode_configs()[100]
    measurer = ReplayMeasurer(SMALL)
    failed, unknown = measurer.sample([broken.config, stranger], 2, 1.0)
    assert failed == broken.failed and unknown.error == "Unknown"
    assert measurer.gate(stranger).error == "Unknown"
    assert measurer.build([broken.config])[0].failed == broken.failed


def test_a_slow_config_leaves_after_one_value():
    measurer = ReplayMeasurer(SMALL)
    healthy = [t.config for t in SMALL.trials if t.screening][:5]
    assert all(len(times) == 1 for times in measurer.sample(healthy, 6, 1.0, 1e-3))


def test_a_tuning_of_the_whole_space_of_a_replay_is_the_study_again(tmp_path):
    measurer = ReplayMeasurer(SMALL, 1)
    method = Method("exhaustive", rounds=12, all_up_to=2**31)
    record = tune_subject(SMALL.subject, measurer, measurer.build, method)
    found = study_of(record)
    assert len(found.trials) == len(SMALL.trials)
    for index, trial in enumerate(SMALL.trials):
        assert found.trials[index].failed == trial.failed
        if trial.screening:
            again = cost(found.trials, index, found.default)
            assert again == pytest.approx(cost(SMALL.trials, index, SMALL.default), rel=0.02)
            assert found.trials[index].gate == trial.gate
    save(found, tmp_path / "again.json")
    assert load_study(tmp_path / "again.json") == found


def test_a_tuning_without_time_counts_what_it_did_not_try():
    measurer = ReplayMeasurer(SMALL, 1)
    method = Method("exhaustive", budget_s=0.0, all_up_to=2**31)
    found = study_of(tune_subject(SMALL.subject, measurer, measurer.build, method))
    assert dict(found.rejected)[NOT_TRIED] + len(found.trials) == len(SMALL.trials)
