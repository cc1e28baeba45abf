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


def test_of_which_releases_the_contract_is(ours):
    first, *_, last = sglang.RELEASES
    assert f"SGLang {first} to {last}" in ours.__doc__


@pytest.mark.parametrize("version", sglang.RELEASES)
def test_each_release_makes_a_backend(monkeypatch, version):
    ours = imported(monkeypatch, sglang.modules(version=version), NAME)
    of = Requests()
    assert ours.FlexattnBackend(sglang.runner(of, Pool(of), version=version))._rows == 32 + 6


def test_an_sglang_that_lacks_a_name_is_told_in_words(monkeypatch):
    modules = sglang.modules()
    del modules["sglang.srt.mem_cache.swa_memory_pool"].SWAKVPool
    with pytest.raises(UnsupportedError, match=r"(?s)SGLang lacks.*0\.5\.17 to 0\.5\.23"):
        imported(monkeypatch, modules, NAME)


def test_the_class_fits_the_contract(ours):
    assert_same_signatures(sglang.AttentionBackend, ours.FlexattnBackend)
    assert not ours.FlexattnBackend.needs_cpu_seq_lens


def test_the_contract_is_that_of_the_real_package():
    real = pytest.importorskip(REAL, reason="SGLang is not installed", exc_type=ImportError)
    assert_same_signatures(sglang.AttentionBackend, real.AttentionBackend)


@pytest.mark.parametrize(("holder", "field", "named"), [
    ("", "use_mla_backend", "MLA"),
    ("", "is_draft_worker", "--speculative-draft-attention-backend"),
    ("kv_index_translator", "is_translating", "unified-memory"),
    ("token_to_kv_pool", "is_quantized_kv_cache", "4 bits"),
])  # fmt: skip
def test_a_runner_that_is_refused(ours, holder, field, named):
    of = Requests()
    runner = sglang.runner(of, Pool(of))
    setattr(getattr(runner, holder, runner), field, True)
    with pytest.raises(UnsupportedError, match=named):
        ours.FlexattnBackend(runner)


def test_batches_and_layers_that_are_refused(ours):
    of = Requests()
    runner = sglang.runner(of, Pool(of))
    server, step = ours.FlexattnBackend(runner), of.step({"a": 3})
    batch = sglang.forward_batch(step, runner, ForwardMode.TARGET_VERIFY, of.page)
    with pytest.raises(UnsupportedError, match="drafts of another number"):
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
