"""flexattn.bench and flexattn.tune, with the interpreter for the GPU."""

from functools import partial

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.records.store import Store
from flexattn.settings import override

MASK = flexattn.create_block_mask(causal, None, None, 37, 37, device="cpu")


def inputs():
    return [torch.randn(1, heads, 37, 16) for heads in (4, 2, 2)]


def test_a_call_is_raced_with_its_own_tensors_and_mask(capsys):
    q, k, v = inputs()
    capped = softcap(20.0)
    with override(check=False):
        done = flexattn.bench(q, k, v, capped, MASK, rivals=False, rounds=3)
    assert done.passed and set(done.us) == {"flexattn", "default"}
    assert "green" in capsys.readouterr().out


def test_a_call_that_is_wrong_is_red(monkeypatch):
    from flexattn.cli import bench

    right = bench.flex_attention
    monkeypatch.setattr(bench, "flex_attention", lambda *a, **k: right(*a, **k) * 1.1)
    assert not flexattn.bench(*inputs(), block_mask=MASK, rivals=False, rounds=3).passed


@pytest.mark.slow
def test_a_call_is_tuned_and_its_config_can_be_copied(tmp_path, capsys):
    q, k, v = inputs()
    with override(cache_dir=tmp_path):
        options = flexattn.tune(q, k, v, block_mask=MASK, seconds=0.0)
        assert len(list(Store(tmp_path / "records").paths())) == 1
    shown = capsys.readouterr().out
    assert f"kernel_options={options}" in shown and {"BLOCK_M", "BLOCK_N"} <= set(options)
    attend = partial(flexattn.flex_attention, q, k, v, block_mask=MASK, enable_gqa=True)
    torch.testing.assert_close(attend(kernel_options=options), attend())
