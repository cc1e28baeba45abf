"""What bench.backward times with --config: a backward of numbers that no option says."""

from dataclasses import replace

import pytest
import torch

from bench import backward_peers
from bench.backward_peers import exactly_trained
from bench.inputs import make
from bench.rows import Row
from bench.shapes import Shape

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_bench_may_time_a_config_that_no_option_says(mask, monkeypatch):
    x = make(Row("row", "grid", Shape(1, 2, 1, 33, 33, 16), mask), "cpu", torch.float32)
    dout, configs = torch.randn_like(x.q), []
    prepared = backward_peers.prepare_backward
    monkeypatch.setattr(
        backward_peers, "prepare_backward",
        lambda *a: configs.append(a[4].exact) or prepared(*a),
    )  # fmt: skip
    other, own = (exactly_trained(each, "TRITON")(x, dout) for each in ({}, {"BLOCK_M1": 16}))
    run, again = other.backward(), own.backward()
    for _ in range(2):
        for one, two in zip(run(), again(), strict=True):
            torch.testing.assert_close(one, two)
    assert len(configs) == 2 and configs[1] == replace(configs[0], BLOCK_M1=16) != configs[0]
