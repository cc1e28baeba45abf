"""A worker that dies in the middle of a measurement: the tuner goes on, and says so."""

import dataclasses

import pytest

from flexattn.measure.worker import Deadlines, Worker
from flexattn.tuning.builds import BuiltConfig
from flexattn.tuning.evaluator import Method, Subject
from flexattn.tuning.tuner import tune_subject
from tests.studies import ENVIRONMENT, POLICY, key
from tests.unit.measure.runners import RUNNER, config, task

pytestmark = pytest.mark.usefixtures("forked")
# What becomes of a config in the third round of its race, or of the finals.
FATES = {
    "killed": ("crash", "SIGKILL"),
    "segfault": ("crash", "SIGSEGV"),
    "sticky": ("crash", "RuntimeError"),
    "hang": ("hang", "Deadline"),
    "memory": ("memory", "MemoryError"),
}
POLICY = dataclasses.replace(POLICY, graph=False, cold_l2=False, rounds=3, min_ms=0.0)


class Listener:
    def __init__(self):
        self.notes = []

    def stage(self, name, total):
        pass

    def step(self, text, best_us=None):
        pass

    def note(self, text):
        self.notes.append(text)


def tuned_beside(fates, at):
    """Tune three configs beside one of each fate, which comes at its call of this number."""
    good = [config(number=number) for number in (1, 2, 3)]
    bad = {kind: config(kind, at, 8 + place) for place, kind in enumerate(fates)}
    subject = Subject(key(), (1, 8192, 8192), ENVIRONMENT, POLICY, (*good, *bad.values()), 0)
    said = Listener()

    def build(configs):
        return [
            BuiltConfig(each, registers=9, spills=0, shared_memory=0, code_hash=str(each))
            for each in configs
        ]

    # Everything runs alike here: each that lives is raced to the end.
    method = Method(rounds=4, margin=0.9)
    with Worker(RUNNER, deadlines=Deadlines(start=60, open=5, gate=2, step=1)) as worker:
        worker.open(task())
        record = tune_subject(subject, worker, build, method, progress=said)
    trials = {trial.config: trial for trial in record.trials}
    assert record.config in good and all(trials[each].failed is None for each in good)
    lost = 0
    for kind, each in bad.items():
        failed = trials[each].failed
        assert (failed.stage, failed.error) == FATES[kind]
        lost += failed.stage != "memory"
        told = [note for note in said.notes if failed.error in note]
        assert bool(told) == (failed.stage != "memory"), said.notes
    assert worker.starts == 1 + lost


def test_a_tuning_goes_on_without_what_killed_its_worker():
    tuned_beside(["killed"], 8)


@pytest.mark.long
def test_a_screening_goes_on_without_what_ended_its_workers():
    tuned_beside(FATES, 8)


@pytest.mark.long
@pytest.mark.parametrize("fate", FATES)
def test_a_race_goes_on_without_what_ended_its_worker(fate):
    # One by one: a new worker counts calls anew, and few get into the finals.
    tuned_beside([fate], 14)
