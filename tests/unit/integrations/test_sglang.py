"""What SGLang's backend refuses, and the contract itself; batches are in tests/interpreter."""

import pytest
import torch

from flexattn.errors import UnsupportedError
from tests.contracts import assert_same_signatures, imported, sglang
from tests.contracts.requests import Requests
from tests.contracts.sglang import ForwardMode, Pool

NAME = "flexattn.integrations.sglang"
REAL = "sglang.srt.layers.attention.base_attn_backend"


@pytest.fixture
def ours(monkeypatch):
    return imported(monkeypatch, sglang.modules(), NAME)


def test_of_which_release_the_contract_is(ours):
    assert f"SGLang {sglang.VERSION}" in ours.__doc__


def test_the_class_fits_the_contract(ours):
    assert_same_signatures(sglang.AttentionBackend, ours.FlexattnBackend)
    assert not ours.FlexattnBackend.needs_cpu_seq_lens


def test_the_contract_is_that_of_the_real_package():
    real = pytest.importorskip(REAL, reason="SGLang is not installed", exc_type=ImportError)
    assert_same_signatures(sglang.AttentionBackend, real.AttentionBackend)


@pytest.mark.parametrize("field", ["use_mla_backend", "is_translating"])
def test_a_runner_that_is_refused(ours, field):
    of = Requests()
    runner = sglang.runner(of, Pool(of))
    holder = runner if hasattr(runner, field) else runner.kv_index_translator
    setattr(holder, field, True)
    with pytest.raises(UnsupportedError, match="MLA" if holder is runner else "unified-memory"):
        ours.FlexattnBackend(runner)


def test_batches_and_layers_that_are_refused(ours):
    of = Requests()
    runner = sglang.runner(of, Pool(of))
    server, step = ours.FlexattnBackend(runner), of.step({"a": 3})
    batch = sglang.forward_batch(step, runner, ForwardMode.TARGET_VERIFY, of.page)
    with pytest.raises(UnsupportedError, match="speculative"):
        server.init_forward_metadata(batch)
    batch.forward_mode, batch.encoder_lens = ForwardMode.EXTEND, torch.ones(1)
    with pytest.raises(UnsupportedError, match="an encoder"):
        server.init_forward_metadata(batch)
    rows = step.q.flatten(1), step.k, step.v
    for field, value, name in (
        ("is_cross_attention", True, "not causal"),
        ("attn_type", sglang.AttentionType.ENCODER_ONLY, "not causal"),
        ("use_irope", True, "chunked local"),
        ("xai_temperature_len", 4, "temperature"),
    ):
        with pytest.raises(UnsupportedError, match=name):
            server.forward(*rows, sglang.layer(of, **{field: value}), batch)
    with pytest.raises(UnsupportedError, match="q_rope"):
        server.forward(*rows, sglang.layer(of), batch, q_rope=torch.ones(1))


def test_buffers_grow_for_what_is_captured(ours):
    of = Requests()
    server = ours.FlexattnBackend(sglang.runner(of, Pool(of)))
    before = server._table
    server.init_cuda_graph_state(6, 6)
    assert server._table is before
    server.init_cuda_graph_state(9, 9)
    assert server._table.shape == (9, 6) and len(server._ends) == 10
