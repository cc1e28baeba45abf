"""`flexattn tune` as a whole but for its processes: every GPU works, and nobody builds twice."""

import math
import threading
import time
from collections import Counter

import pytest
import torch

from flexattn.cli import tune
from flexattn.records.record import Gated
from flexattn.records.store import Store
from flexattn.tuning import builds, tuner
from flexattn.tuning.builds import Pool
from flexattn.tuning.evaluator import method_for
from flexattn.tuning.tasks import task_of
from flexattn.tuning.workload import parse_workload
from tests.problems import H200

TAKEN = builds.Resources(100, 0, 0, 4096, 4, 0)


class Worker:
    """Times by a rule, and notes which GPU measured which problem."""

    measured: list = []

    def __init__(self, gpu, say):
        self.gpu, self.title = gpu, ""

    def start(self):
        pass

    def open(self, task):
        self.title = task.title
        time.sleep(0.05)
        self.measured.append((self.gpu, task.title))

    def gate(self, config):
        return Gated("out max", 1e-4, 1e-3, 1e-4, True)

    def sample(self, configs, rounds, min_ms, limit_us=math.inf):
        return [tuple(10 + each.BLOCK_N / 64 + i / 99 for i in range(rounds)) for each in configs]

    def close(self):
        pass


class Compilers(Pool):
    """A pool whose threads compile themselves, at once."""

    compiled: Counter = Counter()

    def __init__(self, jobs):
        super().__init__(builds.compile_one, jobs, deadline=1.0)

    def _done(self, order):
        self.compiled[order.name] += 1
        return TAKEN, f"{self.compiled.total():064}", 0.1


@pytest.fixture
def host(monkeypatch):
    """Two GPUs, and no process that measures or compiles."""
    monkeypatch.setattr(tune, "gpus_like", lambda device: [0, 1])
    monkeypatch.setattr(tune, "compilers", Compilers)
    monkeypatch.setattr(tuner, "Worker", Worker)
    monkeypatch.setattr(Worker, "measured", [])
    monkeypatch.setattr(Compilers, "compiled", Counter())


def rows(*calls):
    layer = {"heads": [4, 2], "head_dim": 64, "calls": list(calls)}
    return parse_workload({"layers": [layer]}, "x", "x").rows


def test_every_gpu_measures_and_no_kernel_is_built_twice(host, tmp_path):
    decode = rows({"mixes": [[1, 1, 64 << i] for i in range(6)]})
    tasks = [task_of(row, H200, torch.device("cpu")) for row in decode]
    ran = tune.run_tuning(tasks, Store(tmp_path), method_for("quick"), 2, False, None)
    assert [each.status for each in ran.outcomes] == ["tuned"] * 6
    assert {gpu for gpu, _ in Worker.measured} == {0, 1}
    assert Counter(title for _, title in Worker.measured) == Counter(t.title for t in tasks)
    assert Compilers.compiled and set(Compilers.compiled.values()) == {1}
    assert threading.active_count() < 20


def test_plans_and_calls_are_tuned_side_by_side(host, tmp_path):
    found = rows(
        {"name": "call", "mixes": [[8, 1, 300]]},
        {
            "name": "plan",
            "mixes": [[8, 1, 300]],
            "page_size": 16,
            "lengths": ["uniform", "ragged"],
        },
    )
    tasks = [task_of(row, H200, torch.device("cpu")) for row in found]
    store = Store(tmp_path)
    ran = tune.run_tuning(tasks, store, method_for("quick"), 2, False, None)
    assert [each.status for each in ran.outcomes] == ["tuned"] * 3, ran.outcomes
    kinds = Counter(record.key.kind for _, record in store.entries())
    assert kinds == {"decode": 1, "serving": 2}
    assert len(store.folders("nvidia-h200")) == 2, "each kind has templates of its own"
    again = tune.run_tuning(tasks, store, method_for("quick"), 2, False, None)
    assert [each.status for each in again.outcomes] == ["kept"] * 3


def test_no_problem_begins_when_the_time_is_over(host, tmp_path):
    decode = rows({"mixes": [[1, 1, 64 << i] for i in range(6)]})
    tasks = [task_of(row, H200, torch.device("cpu")) for row in decode]
    ran = tune.run_tuning(tasks, Store(tmp_path), method_for("quick"), 2, False, None, time_s=0.0)
    assert ran.outcomes == () and not Worker.measured
