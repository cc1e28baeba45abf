"""What vLLM asks before it serves, and the contract itself; batches are in tests/interpreter."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from flexattn.errors import InputError, UnsupportedError
from tests.contracts import assert_same_signatures, imported, vllm

NAME = "flexattn.integrations.vllm"


@pytest.fixture
def ours(monkeypatch):
    return imported(monkeypatch, vllm.modules(vllm.config(16)), NAME)


def test_of_which_release_the_contract_is(ours):
    assert f"vLLM {vllm.VERSION}" in ours.__doc__


def test_the_classes_fit_the_contract(ours):
    for base, name in vllm.CLASSES.items():
        assert_same_signatures(base, getattr(ours, name))
        assert not inspect.isabstract(getattr(ours, name))
    assert ours.FlexattnBackend.get_impl_cls() is ours.FlexattnImpl
    assert ours.FlexattnBackend.get_builder_cls() is ours.FlexattnMetadataBuilder
    assert not ours.FlexattnBackend.forward_includes_kv_cache_update


def test_the_contract_is_that_of_the_real_package():
    real = pytest.importorskip(vllm.BACKEND, reason="vLLM is not installed", exc_type=ImportError)
    for double in vllm.CLASSES:
        assert_same_signatures(double, getattr(real, double.__name__))
    fields = [*inspect.signature(real.CommonAttentionMetadata).parameters]
    assert fields[: len(vllm.FIELDS)] == vllm.FIELDS


@pytest.mark.parametrize(
    ("dtype", "cache", "served"),
    [
        (torch.bfloat16, "auto", True),
        (torch.bfloat16, "bfloat16", True),
        (torch.bfloat16, "float16", False),
        (torch.bfloat16, "fp8_e5m2", True),
        (torch.float32, "fp8", False),
        (torch.float32, "auto", True),
    ],
)
def test_which_caches_go_with_which_queries(ours, dtype, cache, served):
    backend = ours.FlexattnBackend
    assert dtype in backend.supported_dtypes and cache in backend.supported_kv_cache_dtypes
    place = (16, False, False, False, False, None)
    assert (backend.supports_combination(128, dtype, cache, *place) is None) == served


def test_what_it_has_and_what_it_has_not(ours):
    backend = ours.FlexattnBackend
    assert backend.supports_sink() and backend.supports_sliding_window()
    assert backend.supports_batch_invariance()
    assert backend.supports_head_size(576) and not backend.supports_head_size(577)
    assert max(backend.get_supported_kernel_block_sizes()) == 256


def test_what_is_refused(ours):
    with pytest.raises(UnsupportedError, match="encoder_only"):
        ours.FlexattnImpl(4, 16, 0.25, 2, attn_type="encoder_only")
    impl = ours.FlexattnImpl(4, 16, 0.25, 2)
    with pytest.raises(UnsupportedError, match="quantised"):
        impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    for shape in ((9, 16, 2, 32), (2, 9, 16, 2, 16), (9, 2, 16, 24)):
        with pytest.raises(InputError, match=r"it is \[blocks, 2, block, 32\]"):
            impl.do_kv_cache_update(None, None, None, torch.zeros(shape), None)
    builder = ours.FlexattnMetadataBuilder(
        SimpleNamespace(block_size=16), [], vllm.config(16), torch.device("cpu")
    )
    with pytest.raises(UnsupportedError, match="not causal"):
        builder.build(0, SimpleNamespace(causal=False))


def test_layers_of_one_engine_share_their_plans(ours, monkeypatch):
    config = vllm.config(16)
    monkeypatch.setattr(ours, "get_current_vllm_config", lambda: config)
    layers = config.compilation_config.static_forward_context
    layers["of another backend"] = SimpleNamespace()
    first = ours.FlexattnImpl(4, 16, 0.25, 2)
    layers["0"] = SimpleNamespace(impl=first)
    assert ours.FlexattnImpl(4, 16, 0.25, 2).plans is first.plans
    layers.clear()
    assert ours.FlexattnImpl(4, 16, 0.25, 2).plans is not first.plans
