"""What bench.backward times with --config: a backward of numbers that no option says."""

from dataclasses import replace

import pytest
import torch

from bench import peers
from bench.backward import Backward
from bench.inputs import make
from bench.peers import exactly_trained
from bench.rows import Row, Shape


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_bench_may_time_a_config_that_no_option_says(mask, monkeypatch):
    x = make(Row("row", "grid", Shape(1, 2, 1, 33, 33, 16), mask), "cpu", torch.float32)
    prepared, configs = peers.prepare_backward, []
    monkeypatch.setattr(
        peers, "prepare_backward", lambda *a: configs.append(a[4].exact) or prepared(*a)
    )
    run, again = (
        Backward.of(exactly_trained(each, "TRITON")(x), x) for each in ({}, {"BLOCK_M1": 16})
    )
    for _ in range(2):
        for one, two in zip(run(), again(), strict=True):
            torch.testing.assert_close(one, two)
    assert len(configs) == 2 and configs[1] == replace(configs[0], BLOCK_M1=16) != configs[0]


def test_guarded_loops_give_the_same_gradients():
    """Also of rows and keys that no tile has: their loops have no turn, and zeros are stored."""
    row = Row("row", "mods", Shape(1, 2, 1, 150, 150, 16), "causal", "relative", learned=True)
    x = make(row, "cpu", torch.float32)
    x = replace(x, mask_mod=lambda b, h, q, k: (q > 130) & (k < 20))
    wanted, found = (
        Backward.of(exactly_trained({"guarded": on}, "TRITON")(x), x)() for on in (False, True)
    )
    for one, two in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(one, two)
    torch.testing.assert_close(found[3], wanted[3])
    assert not found[0][:, :, :131].any() and not found[1][:, :, 20:].any()
    assert found[0][:, :, 131:].all() and found[3].any()
