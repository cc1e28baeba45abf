"""A peer of a training step that is late, or fails, does not cost the others their rows."""

import time
from argparse import Namespace

import pytest
import torch

from bench import training_step as bench
from bench.training_step import (
    EAGER,
    NONE,
    OURS,
    TORCH,
    Late,
    ended_after,
    kernel_lines,
    measure,
)  # fmt: skip
from tests.compiled import as_on_a_gpu

ASKED = Namespace(batch=2, length=64, mean=16, layers=1, rounds=2, limit=0.3, kernels=0)


@pytest.fixture
def steps(monkeypatch):
    """What a peer's step does; the peers' own are not made."""
    found = dict.fromkeys((NONE, OURS, EAGER, TORCH), lambda: torch.tensor(5.0))
    monkeypatch.setattr(bench, "_attends", lambda *_: {n: lambda n=n: (n, None) for n in found})
    monkeypatch.setattr(bench, "_step", lambda asked, tokens, name, mask: found[name])
    monkeypatch.setattr(bench, "_seconds", lambda step: 2e-3 if step is found[NONE] else 3e-3)
    found[NONE] = lambda: torch.tensor(6.0)
    monkeypatch.setattr(bench, "_of_attention", lambda step, name: {"flexattn": 400.0})
    monkeypatch.setattr(bench, "describe", dict)
    return found


def measured():
    reports = list(measure(ASKED, "cpu"))
    for report in reports:
        bench.table(report)
    return [{row.name: row for row in report.rows} for report in reports]


def test_torchs_step_is_measured_beside_the_others(steps):
    before, after = measured()
    assert list(before["step"].samples) == [OURS, EAGER]
    assert list(after["step"].samples) == [OURS, EAGER, TORCH]
    assert all(gate.passed for gate in after["step"].gates.values())


def test_a_late_peer_is_left_out(steps):
    steps[TORCH] = steps[EAGER] = lambda: time.sleep(20)
    (found,) = measured()
    assert list(found["step"].samples) == [OURS]
    assert found["step"].refused == {EAGER: "not compiled within 0.3 s"}


def test_a_peer_that_fails_is_left_out(steps):
    def fail():
        raise torch.OutOfMemoryError("too large\nby far")

    steps[OURS] = fail
    _, after = measured()
    assert after["step"].refused == {OURS: "OutOfMemoryError: too large"}
    assert list(after["attention-beyond"].samples) == [EAGER, TORCH]


def test_a_profile_without_attention_costs_one_row(steps, monkeypatch):
    def unseen(step, name):
        if name == TORCH:
            raise RuntimeError("no kernel of attention")
        return {"flexattn": 400.0}

    monkeypatch.setattr(bench, "_of_attention", unseen)
    _, after = measured()
    assert list(after["step"].samples) == [OURS, EAGER, TORCH]
    assert after["attention-kernels"].refused == {TORCH: "no kernel of attention"}


def test_no_peer_runs_another_s_graphs(monkeypatch):
    """A graph that the eager call breaks served all: it calls whatever its block has."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(bench, "WIDTH", 32)
    monkeypatch.setattr(bench, "HEADS", 2)
    ran = []

    def counted(graph, _):
        nodes = sum("flex_attention" in str(node.target) for node in graph.graph.nodes)
        return lambda *given: ran.append(nodes) or graph(*given)

    torch._dynamo.reset()
    peers = {}
    for name in (NONE, OURS, EAGER):
        attend, mask = bench._attends(ASKED, "cpu")[name]()
        peers[name] = bench.GPT(2, attend), mask
        for block in peers[name][0].blocks:
            block.compile(backend=counted)
    found = {}
    for name in (*peers, *peers):
        ran.clear()
        model, mask = peers[name]
        model(torch.zeros(2, 64, dtype=torch.int64), mask)
        found.setdefault(name, []).append([*ran])
    torch._dynamo.reset()
    one, broken = [1] * 2, [0] * 4
    assert found == {NONE: [[0] * 2] * 2, OURS: [one] * 2, EAGER: [broken] * 2}


def test_what_catches_exceptions_does_not_keep_a_late_peer():
    with pytest.raises(Late), ended_after(0.1):
        try:
            time.sleep(20)
        except Exception:
            time.sleep(20)


def test_kernels_that_differ_most_come_first():
    ours = {"copy": (300.0, 12), "product": (5000.0, 24)}
    other = {"product": (4990.0, 24), "stack": (200.0, 12)}
    first, second = kernel_lines(ours, other, 2)
    assert first.endswith("copy") and "0.30 ms in   12      0.00 ms in    0" in first
    assert second.endswith("stack")
