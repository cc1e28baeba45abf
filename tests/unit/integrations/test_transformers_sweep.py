"""Whole models of transformers that read their mask, or hand on more than others, on the CPU."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa_of_torch

from flexattn.integrations.transformers import attend_transformers, mask_kind, register
from tests.support import inputs
from tests.transformers_sweep import tiny, verdict

pytest.importorskip("transformers", reason="transformers is not installed: make test installs it")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("doge", "padded"),  # saw the future: it adds the mask itself, but not a BlockMask
        ("inkling2_text", "plain"),  # lost its sinks, one of each row
        ("deepseek_v32", "static"),  # cut its mask as a tensor; it hands on the keys it chose
        ("gpt2", "static"),  # asked its mask for ndim
        ("git", "padded"),  # adds the mask itself, and cannot be given another attention
        ("splinter", "plain"),  # was causal: its layers do not say that they are not
        pytest.param("t5gemma2", "generate", marks=pytest.mark.long),  # joins two masks
        pytest.param("hy_v4", "padded", marks=pytest.mark.long),  # chosen keys, and sinks
        pytest.param("gpt_oss", "static", marks=pytest.mark.long),  # no sdpa, and a BlockMask
    ],
)
def test_models_that_were_wrong_or_crashed(name, call):
    found = verdict(tiny(name), call)
    assert found.word == "right", found


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_models_that_declare_flex_attention_get_block_masks(name):
    """A tensor would be right as well, and no block of it be left out before it is read."""
    assert mask_kind(type(tiny(name).config)) == "block"


def test_architectures_drawn_by_a_seed():
    """Four of those that write text: none is wrong, or crashes where eager or sdpa works."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    drawn = random.Random(15).sample(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 4)
    found = {name: verdict(model, "padded") for name in drawn if (model := tiny(name))}
    assert {each.word for each in found.values()} == {"right"}, found


def test_a_prefix_does_not_see_what_comes_after_it():
    """Doge's logits of the first token hung on the last one."""
    model, ids = tiny("doge"), torch.randint(3, 90, (1, 13))
    model.set_attn_implementation("flexattn")
    with torch.no_grad():
        whole, other = (
            model(each).logits[0, 0] for each in (ids, torch.cat([ids[:, :9], ids[:, :4]], 1))
        )
    torch.testing.assert_close(whole, other)


def test_a_layer_that_does_not_say_is_no_causal_one_without_sdpa():
    """Splinter's layers have no is_causal, its encoder's mask is None, and eager sees all."""
    q, k, v = inputs(2, 4, 2, 9, 9)
    layer = SimpleNamespace(config=SimpleNamespace())
    for each, causal in ((layer, False), (SimpleNamespace(), True)):
        wanted = sdpa_of_torch(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(attend_transformers(each, q, k, v, None)[0], wanted)


@pytest.mark.parametrize(
    ("flex", "sdpa", "replaced", "own", "kind"),
    [
        (True, True, True, False, "block"),
        (True, False, True, False, "block"),
        (False, True, True, False, "sdpa"),
        (True, True, True, True, "sdpa"),
        (False, False, True, False, "eager"),
        (True, True, False, False, "eager"),
    ],
)
def test_what_a_class_says_decides_the_kind_of_mask(monkeypatch, flex, sdpa, replaced, own, kind):
    from transformers import PreTrainedConfig, PreTrainedModel

    class Config(PreTrainedConfig):
        pass

    class Finer(Config):
        pass

    class Model(PreTrainedModel):
        config_class = Config
        _supports_flex_attn, _supports_sdpa = flex, sdpa
        _can_set_attn_implementation_cached_value = replaced

    if own:
        monkeypatch.setitem(globals(), "BlockMask", object)
    assert Model.config_class is Config
    assert (mask_kind(Config), mask_kind(Finer)) == (kind, kind)
