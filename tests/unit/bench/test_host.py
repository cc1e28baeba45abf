"""Calls whose host part is timed: in bursts, and of a cache that grows."""

from dataclasses import replace

import torch

from bench import decode, runner
from bench.inputs import make
from bench.peers import OURS, Ready, call_of
from bench.rows import host_rows
from bench.runner import Method, run
from tests.unit.bench.test_bench import ROWS, rightly


def test_each_call_of_a_growing_cache_has_a_key_more(monkeypatch):
    monkeypatch.setattr(decode, "FIRST", 257)
    row = next(row for row in host_rows() if row.name == decode.GROWING)
    row = replace(row, shape=replace(row.shape, kv_len=259, hq=2, hkv=1, d=16))
    lengths = []

    def peer(given):
        assert given.row.shape.kv_len == given.k.shape[2] == given.v.shape[2]
        return Ready(lambda: lengths.append(given.k.shape[2]), ())

    call = call_of(decode.growing(peer), make(row, "cpu", torch.float32))
    for _ in range(4):
        call()
    assert lengths == [257, 258, 259, 257]


def test_a_race_of_the_host_has_a_burst_of_each_in_each_round(monkeypatch):
    monkeypatch.setattr(runner, "HOST_CALLS", 2)
    method = Method(rounds=3, clock="host", device="cpu", dtype=torch.float32)
    (row,) = run("host", ROWS[:1], {OURS: rightly, "rival": rightly}, method).rows
    assert row.gates[OURS].passed
    assert [(len(each.us), each.calls) for each in row.samples.values()] == [(3, 2)] * 2
