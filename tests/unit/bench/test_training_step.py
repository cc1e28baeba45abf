"""A training step: its gate is the loss, and a peer that fails does not cost the others theirs."""

from dataclasses import replace

import pytest
import torch

from bench import training_step as bench
from bench.runner import Method, run_row
from bench.training_step import EAGER, KERNELS, OURS, TORCH, Step, TrainingRow
from tests.compiled import as_on_a_gpu

ROW = TrainingRow("step", batch=2, length=64, mean=16, layers=1)
METHOD = Method(rounds=2, device="cpu")


@pytest.fixture
def losses(monkeypatch):
    """The loss of each peer's steps, or what they raise; the peers' own are not made."""
    found = dict.fromkeys((TORCH, OURS, EAGER), 5.0)

    def prepare(name, x):
        if isinstance(found[name], Exception):
            raise found[name]
        x.losses[name] = found[name]
        return Step(name, lambda: torch.tensor(found[name]), found[name])

    monkeypatch.setattr(bench, "TRAINING", replace(bench.TRAINING, prepare=prepare))
    return found


def measured(row=ROW):
    return run_row(row, {name: name for name in (TORCH, OURS, EAGER)}, METHOD, bench.TRAINING)


def test_steps_are_timed_where_the_loss_is_torchs(losses):
    row = measured()
    assert list(row.samples) == [TORCH, OURS, EAGER] and row.gates[OURS].passed
    losses[EAGER] = 5.1
    row = measured()
    assert list(row.samples) == [TORCH, OURS] and not row.gates[EAGER].passed
    losses[OURS] = 4.9
    assert measured().samples == {}


def test_a_peer_that_fails_is_left_out(losses):
    losses[TORCH] = torch.OutOfMemoryError("too large\nby far")
    row = measured()
    assert row.refused == {TORCH: "OutOfMemoryError: too large"}
    assert list(row.samples) == [OURS, EAGER]


def test_the_kernels_of_attention_are_those_of_its_peer(losses, monkeypatch):
    names = {"flexattn_prefill": 300.0, "triton_tem_fused_flex_attention_0": 500.0, "gemm": 9.0}
    monkeypatch.setattr(bench, "kernels", lambda step: names)
    samples = measured(replace(ROW, name=KERNELS)).samples
    assert {name: each.us for name, each in samples.items()} == {
        TORCH: (500.0,) * 3, OURS: (300.0,) * 3, EAGER: (300.0,) * 3,
    }  # fmt: skip


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
    for name in (OURS, EAGER):
        attend, mask = bench.attends(ROW, "cpu")[name]()
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
    assert found == {OURS: [one] * 2, EAGER: [broken] * 2}


def test_packed_rows_are_the_same_documents_by_lengths_and_by_mask():
    row = replace(ROW, packed=True)
    torch.manual_seed(0)
    heads = torch.randn(3, row.batch, 2, row.length, 16)
    known = bench.attends(row, "cpu")
    found = {}
    for name in (TORCH, OURS, EAGER):
        attend, mask = known[name]()
        found[name] = attend(*heads, mask)
    assert (bench.FA4 in known) and bench.FA4 not in bench.attends(ROW, "cpu")
    for each in found.values():
        torch.testing.assert_close(each, found[TORCH])
