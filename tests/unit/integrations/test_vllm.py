"""What vLLM asks before it serves, and the contract itself; batches are in tests/interpreter."""

import inspect
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from flexattn.errors import InputError, UnsupportedError
from tests.contracts import assert_same_signatures, imported, vllm
from tests.contracts.requests import Requests

NAME = "flexattn.integrations.vllm"


@pytest.fixture
def ours(monkeypatch):
    return imported(monkeypatch, vllm.modules(vllm.config(16)), NAME)


def test_of_which_releases_the_contract_is(ours):
    first, *_, last = vllm.RELEASES
    assert f"vLLM {first} to {last}" in ours.__doc__


@pytest.mark.parametrize("version", vllm.RELEASES)
def test_the_classes_fit_the_contract(monkeypatch, version):
    ours = imported(monkeypatch, vllm.modules(vllm.config(16), version=version), NAME)
    for base, name in vllm.CLASSES.items():
        assert_same_signatures(base, getattr(ours, name))
        assert not inspect.isabstract(getattr(ours, name))
    assert ours.FlexattnBackend.get_impl_cls() is ours.FlexattnImpl
    assert ours.FlexattnBackend.get_builder_cls() is ours.FlexattnMetadataBuilder
    assert not ours.FlexattnBackend.forward_includes_kv_cache_update


def test_the_contract_is_that_of_the_real_package():
    real = pytest.importorskip(vllm.BACKEND, reason="vLLM is not installed", exc_type=ImportError)
    others = {*vllm.RELEASES.values()} - {vllm.RELEASES[version("vllm")]}
    for double, name in vllm.CLASSES.items():
        if double not in others:
            assert_same_signatures(double, getattr(real, name.replace("Flexattn", "Attention")))
    fields = [*inspect.signature(real.CommonAttentionMetadata).parameters]
    assert fields[: len(vllm.FIRST)] == vllm.FIRST and {*vllm.FIELDS} <= {*fields}


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
    assert backend.supports_batch_invariance() and backend.supports_mm_prefix()
    assert backend.supports_non_causal() and backend.supports_per_head_quant_scales()
    assert all(backend.supports_attn_type(kind) for kind in vllm.AttentionType)
    assert backend.supports_head_size(576) and not backend.supports_head_size(577)
    assert max(backend.get_supported_kernel_block_sizes()) == 256


def test_what_is_refused(ours):
    impl = ours.FlexattnImpl(4, 16, 0.25, 2)
    with pytest.raises(UnsupportedError, match="quantised"):
        impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    for shape in ((9, 16, 2, 32), (2, 9, 16, 2, 16), (9, 2, 16, 24)):
        with pytest.raises(InputError, match=r"it is \[blocks, 2, block, 32\]"):
            impl.do_kv_cache_update(None, None, None, torch.zeros(shape), None)
    builder = ours.FlexattnMetadataBuilder(
        SimpleNamespace(block_size=16), [], vllm.config(16), torch.device("cpu")
    )
    step = Requests().step({"a": 3})
    for batch in ({"causal": False}, {"mm_req_doc_ranges": {0: [(0, 2)]}}):
        with pytest.raises(UnsupportedError, match="configuration says nothing"):
            builder.build(0, vllm.common(step, **batch))


def test_microbatches_of_a_model_with_images_are_refused(ours, monkeypatch):
    config = vllm.config(16, images=True)
    config.parallel_config.use_ubatching = True
    monkeypatch.setattr(ours, "get_current_vllm_config", lambda: config)
    with pytest.raises(UnsupportedError, match="--enable-dbo"):
        ours.FlexattnImpl(4, 16, 0.25, 2)


@pytest.mark.parametrize("name", ["vllm.v1.attention.backend", "vllm.config"])
def test_a_vllm_that_lacks_a_name_is_told_in_words(monkeypatch, name):
    """An ImportError would be swallowed: vLLM takes it for a backend that is not installed."""
    modules = vllm.modules(vllm.config(16))
    modules[name].__dict__.pop("AttentionImpl", None) or modules[name].__dict__.pop(
        "get_current_vllm_config"
    )
    with pytest.raises(UnsupportedError, match=r"(?s)vLLM lacks.*0\.26 to 0\.33"):
        imported(monkeypatch, modules, NAME)


def test_layouts_and_packing_are_declared(monkeypatch):
    def backend(version, **more):
        modules = vllm.modules(vllm.config(16), version=version, **more)
        return imported(monkeypatch, modules, NAME).FlexattnBackend

    for order, wanted in (("NHD", (0, 2, 1, 3)), ("HND", (0, 1, 2, 3))):
        old = backend("0.26.0", order=order)
        assert old.get_kv_cache_stride_order() == wanted
        layered = old.get_kv_cache_stride_order(include_num_layers_dimension=True)
        assert sorted(layered) == [*range(5)] and layered[0] == 1, "blocks are outermost"
        assert old.get_kv_cache_shape(9, 16, 2, 64) == (9, 2, 16, 128)
        assert "fp8_per_token_head" not in old.supported_kv_cache_dtypes
    new = backend("0.33.0")
    names = [each.name for each in new.supported_kv_cache_layouts()]
    assert names[0] == "LBNHC" and "LHBNC" not in names and len(names) == 5
    assert "fp8_per_token_head" in new.supported_kv_cache_dtypes
    plain = vllm.Spec(16, 128, 128)
    packed = vllm.Spec(16, 128, 128, vllm.KVQuantMode.FP8_PER_TOKEN_HEAD)
    assert new.customize_spec(plain) is plain
    changed = new.customize_spec(packed)
    assert changed.state_content_bytes == 272 and new.customize_spec(changed) is changed


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
