"""Models of transformers on a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flexattn.integrations.transformers import attend_transformers, make_mask, register
from tests.models import MODELS, WITH_SDPA, greedy, logits, padded, prompts, tiny
from tests.support import assert_close_as, inputs

pytest.importorskip("transformers", "5.23", reason="no transformers of 5.23 or later is here")


# A cache that the model compiles itself for is left to the test of compiled decode.
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}
# Head dims, groups and windows of the sizes that models have.
LARGE = {
    "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


def large(name, dtype=torch.float32, **changes):
    if "sliding_window" in MODELS[name]:
        changes["sliding_window"] = 100
    return tiny(name, dtype, "cuda", **{**LARGE, **changes})


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_sixty_four_greedy_tokens_are_the_models_own(name, cache):
    model, (ids, mask) = large(name), prompts("cuda", 301)
    own = greedy(model, "eager", ids, mask, 64)
    assert torch.equal(greedy(model, "flexattn", ids, mask, 64, **CACHES[cache]), own)
    assert len(set(own[0, -64:].tolist())) > 3
    if name in WITH_SDPA:
        assert torch.equal(greedy(model, "sdpa", ids, mask, 64), own)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_paddings_in_turns(name, options):
    """Steps write their padding to one place; each batch is answered by its own."""
    model = large(name)
    for batch, side in ((2, "left"), (2, "right"), (3, "left"), (2, "none"), (2, "left")):
        ids, mask = (each.cuda() for each in padded(batch, side, 301))
        own = greedy(model, "eager", ids, mask, 12, **options)
        assert torch.equal(greedy(model, "flexattn", ids, mask, 12, **options), own)


@torch.no_grad()
def test_a_step_of_a_padded_batch_waits_for_nothing():
    q, k, v = inputs(4, 8, 2, 1, 640, 64, dtype=torch.bfloat16, device="cuda")
    layer = SimpleNamespace(is_causal=True, training=False)
    seen = torch.arange(640, device="cuda") >= torch.tensor([[0], [200], [30], [0]], device="cuda")

    def step(keys):
        mask = make_mask(4, 1, keys, keys - 1, attention_mask=seen[:, :keys])
        return attend_transformers(layer, q, k[:, :, :keys], v[:, :, :keys], mask)[0]

    step(638)  # it asks, and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [step(keys) for keys in (639, 640)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, keys in zip(got, (639, 640), strict=True):
        call = q, k[:, :, :keys], v[:, :, :keys]
        exact, own = (
            sdpa(*(x.to(dtype) for x in call), seen[:, None, None, :keys], enable_gqa=True)
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_close_as(out.transpose(1, 2), exact, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_near_as_the_models_own(name, cache, dtype):
    """Logits of prefill and decode against the same weights in float32, by the accuracy rule."""
    # Narrow weights: with wide ones a rounding anywhere in a model grows to chance.
    model, (ids, mask) = large(name, dtype, initializer_range=0.04), prompts("cuda", 301)
    exact = logits(copy.deepcopy(model).float(), "eager", ids, mask, 5)
    own = logits(model, "eager", ids, mask, 5)
    got = logits(model, "flexattn", ids, mask, 5, static=cache == "static")
    assert_close_as(got, exact, own)


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_decode_that_transformers_compiles_says_the_same(name):
    """A static cache on a GPU compiles the model with CUDA graphs, around attention."""
    model, (ids, mask) = large(name), prompts("cuda", 301)
    own = greedy(model, "eager", ids, mask, 16)
    got = greedy(model, "flexattn", ids, mask, 16, cache_implementation="static")
    assert torch.equal(got, own)


def test_gradients_reach_every_weight():
    """Training is handed to torch's flex_attention, sinks and all.

    Two of 24,576 gradients once differed by 2 % from the model's own, both in float32: which of
    the two is off is for a model in float64 to say.
    """
    ids, mask = prompts("cuda", 301)
    found = {}
    for implementation, dtype in (
        ("eager", torch.float64), ("eager", torch.float32), ("flexattn", torch.float32),
    ):  # fmt: skip
        model = large("GptOss", dtype)
        model.set_attn_implementation(implementation)
        model.set_experts_implementation("eager")  # the grouped product knows no float64
        model(ids[:1], attention_mask=mask[:1], labels=ids[:1]).loss.backward()
        found[implementation, dtype] = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
    exact, own, ours = found.values()
    assert ours.keys() == exact.keys() and ours["model.layers.0.self_attn.sinks"].any()
    for name, gradient in ours.items():
        rows = [each[name].reshape(-1, each[name].shape[-1]) for each in (exact, own)]
        assert_close_as(gradient.reshape(rows[0].shape), *rows)
