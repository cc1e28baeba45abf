"""A campaign keeps each record as it is made, whatever becomes of the problems after it."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from flexattn.errors import DeviceError, MeasureError
from flexattn.records.record import key_of, sizes_of
from flexattn.records.store import Store
from flexattn.tuning.race import replay_study
from flexattn.tuning.tasks import task_of
from flexattn.tuning.tuner import Campaign, TaskLocks, environment_of, pending
from flexattn.tuning.workload import parse_workload
from tests import records
from tests.problems import H200

LENGTHS = [64, 128, 256, 512]


@pytest.fixture
def tasks():
    mixes = [[1, 1, length] for length in LENGTHS]
    layer = {"heads": [4, 2], "head_dim": 64, "calls": [{"mixes": mixes}]}
    rows = parse_workload({"layers": [layer]}, "x", "x").rows
    return [task_of(row, H200, torch.device("cpu")) for row in rows]


def record_of(task):
    record = replace(
        records.decode_record(),
        key=key_of(task.problem),
        sizes=tuple(sizes_of(task.problem)),
        environment=environment_of(task),
        provenance="measured",
        title=task.title,
    )
    return replace(record, decision=replay_study(record))


def test_what_is_there_is_kept_and_the_rest_is_tuned(tasks, tmp_path):
    store = Store(tmp_path)
    store.write(record_of(tasks[1]))
    assert pending(tasks, store, False) == [tasks[0], tasks[2], tasks[3]]
    found = {each.title: each for each in Campaign(tasks, store, [record_of])}
    assert [found[task.title].status for task in tasks] == ["tuned", "kept", "tuned", "tuned"]
    assert len(list(store.paths())) == 4 and not pending(tasks, store, False)
    again = list(Campaign(tasks, store, [record_of], again=True))
    assert [each.status for each in again] == ["tuned"] * 4


def test_what_was_made_up_never_replaces_what_was_measured(tasks, tmp_path):
    """--from-untuned --again once wrote a record of a representative mask over a real one."""
    store, task = Store(tmp_path), tasks[0]
    made_up = replace(record_of(task), provenance="untuned")
    for tune, status in (
        (lambda t: made_up, "tuned"),
        (record_of, "tuned"),
        (lambda t: made_up, "kept"),
    ):
        (found,) = Campaign([task], store, [tune], again=True)
        assert found.status == status
    assert store.read(environment_of(task), key_of(task.problem)).provenance == "measured"


def test_a_problem_that_fails_does_not_end_the_others(tasks, tmp_path):
    def tune(task):
        if task is tasks[1]:
            raise MeasureError("nothing ran", "something runs")
        return record_of(task)

    found = list(Campaign(tasks, Store(tmp_path), [tune]))
    assert [each.status for each in found] == ["tuned", "failed", "tuned", "tuned"]
    assert "nothing ran" in found[1].message and found[1].answer is None


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_keeps_what_was_finished(tasks, tmp_path, workers):
    def tune(task):
        if task is tasks[2]:
            raise KeyboardInterrupt
        return record_of(task)

    store, found = Store(tmp_path), []
    with pytest.raises(KeyboardInterrupt):
        for each in Campaign(tasks, store, [tune] * workers):
            found.append(each)
    assert {each.status for each in found} == {"tuned"}
    for each in found:
        assert store.read(each.answer.environment, each.key) is not None
    assert pending(tasks, store, False)


def test_workers_take_the_next_problem_when_they_are_free(tasks, tmp_path):
    """Two workers at once: neither could go on without the other."""
    meeting = threading.Barrier(2, timeout=20)
    seen = {0: 0, 1: 0}

    def worker(number):
        def tune(task):
            seen[number] += 1
            meeting.wait()
            return record_of(task)

        return tune

    found = list(Campaign(tasks, Store(tmp_path), [worker(0), worker(1)]))
    assert sorted(each.title for each in found) == sorted(task.title for task in tasks)
    assert seen == {0: 2, 1: 2}


def broken(after=0):
    """A tuner whose device is lost after so many problems; it must not be asked again."""
    asked = []

    def tune(task):
        asked.append(task)
        assert len(asked) <= after + 1, "it was asked after its device was lost"
        if len(asked) > after:
            raise DeviceError("GPU 1 fell off the bus")
        return record_of(task)

    return tune


@pytest.mark.parametrize("after", [0, 1])
def test_a_lost_device_takes_no_more_and_the_others_finish(tasks, tmp_path, after):
    """A worker that fails at once would be free at once, and would fail problem after problem."""
    gone = []
    slow = threading.Event()

    def tune(task):
        slow.wait(0.2)  # the broken one is free first
        return record_of(task)

    found = list(
        Campaign(
            tasks, Store(tmp_path), [broken(after), tune], lost=lambda *told: gone.append(told)
        )
    )
    assert {each.status for each in found} == {"tuned"} and len(found) == len(tasks)
    assert [(number, str(error)) for number, error in gone] == [(0, "GPU 1 fell off the bus")]


@pytest.mark.parametrize("workers", [1, 3])
def test_when_every_device_is_lost_what_is_left_has_failed(tasks, tmp_path, workers):
    gone = []
    found = list(
        Campaign(
            tasks, Store(tmp_path), [broken() for _ in range(workers)],
            lost=lambda number, error: gone.append(number),
        )
    )  # fmt: skip
    assert [each.status for each in found] == ["failed"] * len(tasks)
    assert all("no device is left: GPU 1 fell off" in each.message for each in found)
    assert sorted(gone) == list(range(workers))


def beside(tasks, folder, **more):
    """A campaign that begins while another one of the same folder tunes its first problem."""
    others = []

    def tune(task):
        if not others:
            locks = TaskLocks(folder / "locks")
            others.append(None)
            others[:] = Campaign(
                tasks, Store(folder), [record_of], locks=locks, until=soon, **more
            )
        return record_of(task)

    soon = time.monotonic() + 1.0
    mine = Campaign(tasks, Store(folder), [tune], locks=TaskLocks(folder / "locks"), **more)
    return list(mine), others


@pytest.mark.parametrize("again", [False, True])
def test_what_another_campaign_tunes_is_left_to_it(tasks, tmp_path, again):
    """Each looked once, before it began, and tuned all that had no record then."""
    if again:
        for task in tasks:
            Store(tmp_path).write(record_of(task))
        time.sleep(0.05)
    mine, others = beside(tasks, tmp_path, again=again)
    assert [each.title for each in others] == [task.title for task in tasks[1:]]
    assert {each.status for each in others} == {"tuned"}
    status = {each.title: each.status for each in mine}
    assert [status[task.title] for task in tasks] == ["tuned", "kept", "kept", "kept"]
    assert not list((tmp_path / "locks").iterdir())


def test_a_folder_that_takes_no_locks_is_tuned_without(tasks, tmp_path):
    (tmp_path / "locks").write_text("a file")
    mine, others = beside(tasks[:1], tmp_path)
    assert [each.status for each in (*others, *mine)] == ["tuned", "tuned"]


def test_a_lost_device_gives_its_lock_back(tasks, tmp_path):
    locks = TaskLocks(tmp_path / "locks")
    found = list(Campaign(tasks, Store(tmp_path), [broken(), record_of], locks=locks))
    assert [each.status for each in found] == ["tuned"] * 4
    assert all(TaskLocks(tmp_path / "locks").take(task.title) for task in tasks)


def test_a_link_for_a_lock_is_not_followed_and_holds_nobody_up(tmp_path):
    """It was: the file that the link names was made, or locked, wherever that is."""
    locks, outside = TaskLocks(tmp_path / "locks"), tmp_path / "outside"
    assert locks.take("a")
    (path,) = (tmp_path / "locks").iterdir()
    locks.release()
    path.symlink_to(outside)
    assert locks.take("a") and not outside.exists()


def test_one_of_two_holds_a_lock_and_a_released_one_is_free(tmp_path):
    one, other = TaskLocks(tmp_path), TaskLocks(tmp_path)
    assert one.take("a") and not other.take("a") and other.take("b")
    one.release(["a"])
    assert other.take("a") and not one.take("a")
    other.release()
    assert one.take("a") and one.take("b") and not list(tmp_path.glob("*.tmp"))


class Full(Store):
    """A disk that refuses its first record."""

    refused = False

    def write(self, record, replace=False):
        if not self.refused:
            self.refused = True
            raise OSError(28, "No space left on device")
        return super().write(record, replace)


def test_what_a_record_makes_needless_goes_once_it_is_on_the_disk(tasks, tmp_path):
    store, task = Full(tmp_path / "records"), tasks[0]
    record, told = record_of(task), []

    def landed(record):
        assert store.read(record.environment, record.key) == record, "it is on the disk"
        told.append(record)

    for status, count in (("failed", 0), ("tuned", 1), ("kept", 1)):
        (found,) = Campaign([task], store, [lambda task: record], landed=landed)
        assert found.status == status and told == [record] * count


def test_when_the_time_is_over_nothing_begins_and_what_ran_is_kept(tasks, tmp_path):
    store, began = Store(tmp_path), []

    def slow(task):
        began.append(task.title)
        time.sleep(0.4)
        return record_of(task)

    until = time.monotonic() + 0.6
    found = list(Campaign(tasks, store, [slow], until=until))
    assert [each.status for each in found] == ["tuned", "tuned"]
    assert began == [task.title for task in tasks[:2]]
    assert [each.title for each in pending(tasks, store, False)] == [t.title for t in tasks[2:]]
    assert list(Campaign(tasks[2:], store, [slow, slow], until=0.0)) == []
