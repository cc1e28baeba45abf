"""Several worker processes on one study, in SQLite and in a real PostgreSQL; one is killed."""

import dataclasses
import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.studies import save
from flexattn.errors import InputError
from flexattn.tuning.evaluator import Method
from flexattn.tuning.fleet import RESULT, Heartbeat, SharedStudy, connect, study_name
from flexattn.tuning.race import replay_study
from flexattn.tuning.search import Axes
from tests import postgres
from tests.fleet_worker import HEARTBEAT, METHOD, tune_shared_subject
from tests.processes import started
from tests.replayed import ReplayMeasurer
from tests.studies import decode_configs, study

pytestmark = pytest.mark.slow
SMALL = study(2, decode_configs()[:30], batch=7)
# Two held at once: what dies with a worker is at most that.
HELD = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if postgres.found() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")
    with postgres.server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/study.db"
    return request.getfixturevalue("server")


def start(url, tmp_path, name, stored):
    path = tmp_path / "study.json"
    if not path.exists():
        save(stored, path)
    return started("-m", "tests.fleet_worker", url, tmp_path / "log", name, path, HELD)


def lines(tmp_path, what):
    log = tmp_path / "log"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(name, config) for name, done, config in found if done == what]


def titled(title):
    """Studies of one server are told apart by their subjects."""
    key = dataclasses.replace(SMALL.key, score=title)
    return dataclasses.replace(SMALL, key=key)


@pytest.mark.long
def test_workers_share_a_study_and_one_is_killed(url, tmp_path):
    stored = titled(f"killed {tmp_path}")
    workers = [start(url, tmp_path, f"w{i}", stored) for i in range(3)]
    begun = time.monotonic()
    while not (mine := [c for n, c in lines(tmp_path, "screen") if n == "w0"])[HELD:]:
        assert time.monotonic() - begun < 60, [w.poll() for w in workers]
        time.sleep(0.01)
    workers[0].send_signal(signal.SIGKILL)
    told = []
    for worker in workers[1:]:
        out, err = worker.communicate(timeout=90)
        assert worker.returncode == 0, err
        told.append(json.loads(out))
    workers[0].communicate()
    assert workers[0].returncode == -signal.SIGKILL and mine
    # Nothing lost: both have one record of all configs.
    assert told[0][1:] == told[1][1:] and told[0][2] == len(stored.trials)
    # Nothing measured twice but what was in flight when the worker died.
    default = repr(stored.trials[stored.default].config)
    counts = Counter(c for _, c in lines(tmp_path, "screen") if c != default)
    twice = {config for config, count in counts.items() if count > 1}
    whose = [line for line in lines(tmp_path, "screen") if line[1] in twice]
    assert len(twice) <= HELD and max(counts.values()) <= 2, whose
    healthy = {repr(t.config) for t in stored.trials if t.failed is None}
    assert set(counts) | {default} == healthy
    assert len({name for name, _ in lines(tmp_path, "screen")}) == 3, "all of them worked"


def test_a_late_worker_takes_the_record_and_measures_nothing(url, tmp_path):
    stored = titled(f"late {tmp_path}")
    first, late = ReplayMeasurer(stored, 1), ReplayMeasurer(stored, 2)
    records = [tune_shared_subject(stored.subject, each, url) for each in (first, late)]
    assert records[0] == records[1] and replay_study(records[0]) == records[0].decision
    assert first.measured and not late.measured
    assert len(records[0].trials) == len(stored.trials)


def test_a_guided_search_is_shared(url, tmp_path):
    stored = titled(f"guided {tmp_path}")
    method = Method(rounds=3, all_up_to=0, limit=12)
    measurer = ReplayMeasurer(stored, 1)
    record = tune_shared_subject(
        stored.subject, measurer, url, method, seeds=[stored.trials[7].config]
    )
    tried = [t for t in record.trials if t.screening or t.failed]
    assert 12 <= len(tried) <= 13 and stored.trials[7].config in {t.config for t in tried}


def test_an_interrupted_worker_gives_its_points_back_at_once(url, tmp_path):
    stored = titled(f"interrupted {tmp_path}")

    class Interrupted(ReplayMeasurer):
        def sample(self, *args):
            if len(self.measured) > 20:
                raise KeyboardInterrupt
            return super().sample(*args)

    slow = Heartbeat(beat_s=30, grace_s=600)
    first, second = Interrupted(stored, 1), ReplayMeasurer(stored, 2)
    with pytest.raises(KeyboardInterrupt):
        tune_shared_subject(stored.subject, first, url, heartbeat=slow)
    begun = time.monotonic()
    record = tune_shared_subject(stored.subject, second, url, heartbeat=slow)
    assert time.monotonic() - begun < 60 and len(record.trials) == len(stored.trials)
    default = stored.trials[stored.default].config
    again = {c for c in set(first.gated) & set(second.gated) if c != default}
    assert len(again) <= 4


def study(url, name, heartbeat):
    """A study of five points."""
    return SharedStudy(connect(url, heartbeat), name, Axes(decode_configs()[:5]))


def states(shared):
    return {point: trial.state.name for point, trial in shared.owners().items()}


def test_the_record_that_is_left_first_stays(url, tmp_path):
    one, two = (study(url, f"kept {tmp_path}", HEARTBEAT) for _ in range(2))
    assert one.kept() is None
    assert one.kept("first") == two.kept("second") == two.kept() == "first"


def test_a_point_has_one_owner_until_its_heart_stops(url, tmp_path):
    one, two = (study(url, f"owner {tmp_path}", Heartbeat(0.5, 2)) for _ in range(2))
    with one:
        held = one.take(3)
        assert held and two.take(3) is None
        time.sleep(3)
        assert states(two) == {3: "RUNNING"} and two.take(3) is None, "it beats"
    time.sleep(3)
    assert states(two) == {3: "FAIL"}
    taken = two.take(3)
    assert taken and one.take(3) is None
    assert not one.tell(held, 1.0, "late"), "its result is void"
    assert two.tell(taken, 1.0, "good") and one.owners()[3].user_attrs[RESULT] == "good"
    assert one.take(3) is None and states(one) == {3: "COMPLETE"}


def test_a_worker_that_died_before_its_first_beat_is_found_dead(url, tmp_path, monkeypatch):
    one, two = (study(url, f"early {tmp_path}", Heartbeat(0.5, 2)) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(one._storage, "record_heartbeat", lambda trial_id: None)
        assert one.take(1)
    assert states(two) == {1: "RUNNING"}
    time.sleep(3)
    assert states(two) == {1: "FAIL"} and two.take(1)


def test_of_many_that_want_a_point_one_gets_it(url, tmp_path):
    """Optuna's own queue gives one trial to two workers on SQLite, which then both measure it."""
    name = f"many {tmp_path}"

    def all_five(_):
        mine = study(url, name, Heartbeat(30, 600))
        return [point for point in range(5) if mine.take(point)]

    with ThreadPoolExecutor(6) as pool:
        owned = [point for points in pool.map(all_five, range(6)) for point in points]
    assert sorted(owned) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", ["nothing", "oracle9://x", "sqlite:////no/such/folder/x.db"])
def test_a_url_that_is_no_database_is_an_input_error(wrong):
    with pytest.raises(InputError, match="storage"):
        connect(wrong, HEARTBEAT)


def test_studies_of_other_spaces_and_policies_are_apart():
    subject = SMALL.subject
    other = dataclasses.replace(subject, policy=dataclasses.replace(subject.policy, graph=False))
    fewer = dataclasses.replace(subject, configs=subject.configs[:-1])
    names = {study_name(s, METHOD) for s in (subject, other, fewer)}
    names.add(study_name(subject, dataclasses.replace(METHOD, provenance="untuned")))
    assert len(names) == 4 and all(len(name) <= 128 for name in names)
