"""Models of transformers that attend with flexattn say what they say with their own attention."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flexattn
from flexattn.frontend import attention
from flexattn.integrations import decode_masks
from flexattn.integrations.transformers import attend_transformers, make_mask, register
from flexattn.mods.bind import clear, stats
from tests.models import MODELS, WITH_SDPA, greedy, logits, padded, prompts, tiny
from tests.support import DECODE, KINDS, assert_close_as, inputs

pytest.importorskip("transformers", reason="transformers is not installed: make test installs it")

pytestmark = pytest.mark.slow
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture
def kernels_alone(monkeypatch):
    """No call is computed by plain torch, whose answer is the oracle's own."""
    for path in ("_reference", "_torch"):
        monkeypatch.delattr(attention, path)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(
    ("cache", "steps"),
    [("dynamic", 14), ("static", 14), pytest.param("dynamic", 64, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.long) if x in ("Mistral", "Qwen3") else x for x in MODELS],
)
def test_greedy_tokens_are_the_models_own(name, cache, steps):
    """Prompts of unequal lengths; every window is left behind.

    Of a static cache every step asks for all that it can hold; on a GPU it gives 64 too.
    """
    model, (ids, mask) = tiny(name), prompts()
    own = greedy(model, "eager", ids, mask, steps)
    assert torch.equal(greedy(model, "flexattn", ids, mask, steps, **CACHES[cache]), own)
    assert own.shape == (2, 9 + steps) and len(set(own[0, 9:].tolist())) > 8
    if name in WITH_SDPA:
        assert torch.equal(greedy(model, "sdpa", ids, mask, steps), own)


@pytest.mark.usefixtures("kernels_alone")
def test_paddings_in_turns_over_the_end_of_a_block():
    """One padding removes a whole block of keys; what was made of another is not used for it."""
    model, (ids, mask) = tiny("Llama"), prompts(length=254)
    long = mask.clone()
    long[0, :130] = 0
    for seen in (mask, long, mask):
        own = greedy(model, "sdpa", ids, seen, 3)
        assert torch.equal(greedy(model, "flexattn", ids, seen, 3), own)


# What each model's attention has beyond softmax(qk)v, taken away.
LESS = {
    "Gemma2": {"attn_logit_softcapping": None},
    "Mistral": {"sliding_window": None},
}


@pytest.mark.parametrize("name", [*LESS, "GptOss"])
def test_tokens_depend_on_what_is_special_to_a_model(name):
    """Without its window, its soft-capping or its sinks a model says something else."""
    model, (ids, mask) = tiny(name), prompts()
    if name == "GptOss":
        less = copy.deepcopy(model)
        for layer in less.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    else:
        less = tiny(name, **LESS[name])
    own = greedy(model, "eager", ids, mask, 64)
    assert not torch.equal(greedy(less, "eager", ids, mask, 64), own)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_as_the_models_own(name, cache):
    """Logits of prefill and decode against the same weights in float32, by the accuracy rule."""
    # Narrow weights: with wide ones a rounding anywhere in a model grows to chance.
    model, (ids, mask) = tiny(name, torch.bfloat16, initializer_range=0.1), prompts()
    exact = logits(copy.deepcopy(model).float(), "eager", ids, mask, 5)
    own = logits(model, "eager", ids, mask, 5)
    got = logits(model, "flexattn", ids, mask, 5, static=cache == "static")
    assert_close_as(got, exact, own)


@pytest.mark.parametrize("few", [0, 8192], ids=["many keys", "few keys"])
@pytest.mark.parametrize("at", [126, 128, 300])
def test_a_step_of_a_static_cache_reads_blocks_up_to_its_row(monkeypatch, kernels_alone, at, few):
    """Keys in blocks that are not listed are no numbers; of many keys those before the first too.

    Splits of the keys may find nothing but padding.
    """
    monkeypatch.setattr(decode_masks, "FEW_KEYS", few)
    q, k, v = inputs(3, 4, 2, 1, 400)
    seen = torch.arange(at + 1) >= torch.tensor([0, 130, 290])[:, None]
    seen[:, at] = True  # a row sees itself
    place = torch.tensor(at)
    mask = make_mask(3, 1, 400, place, attention_mask=seen, allow_is_causal_skip=False)
    place += 1
    with torch.no_grad():
        wanted = sdpa(
            q, k[:, :, : at + 1], v[:, :, : at + 1], seen[:, None, None], enable_gqa=True
        )
        for row, keys in enumerate(seen):
            first = 0 if few else int(keys.nonzero()[0]) // 128 * 128
            for x in (k, v):
                x[row, :, :first] = x[row, :, -(-(at + 1) // 128) * 128 :] = float("nan")
        for options in (*KINDS.values(), {**DECODE, "SPLIT_KV": 3}):
            got = flexattn.flex_attention(
                q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options
            )
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("made_with_gradients", [True, False])
def test_a_backward_reads_the_padding_of_its_forward(kernels_alone, made_with_gradients):
    """Steps of another padding come between the two."""
    paddings = [torch.arange(70) >= torch.tensor(each)[:, None] for each in ((0, 40), (30, 0))]
    q, k, v = (each.requires_grad_() for each in inputs(2, 4, 2, 1, 70))
    layer = SimpleNamespace(is_causal=True, training=False)
    with torch.set_grad_enabled(made_with_gradients):
        mask = make_mask(2, 1, 70, 69, attention_mask=paddings[0])
    loss = attend_transformers(layer, q, k, v, mask)[0].square().sum()
    del mask
    with torch.no_grad():
        for _ in range(3):
            mask = make_mask(2, 1, 70, 69, attention_mask=paddings[1])
            attend_transformers(layer, q, k, v, mask)
    got = torch.autograd.grad(loss, (q, k, v))
    wanted = sdpa(q, k, v, paddings[0][:, None, None], enable_gqa=True).square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(wanted, (q, k, v)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [*KINDS.values(), {**DECODE, "SPLIT_KV": 3}], ids=str)
def test_sinks_are_those_of_gpt_oss(kernels_alone, options):
    """out and lse beside its eager attention, which says a sink as one more column."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    layer = tiny("GptOss").model.layers[0].self_attn
    q, k, v = inputs(2, 2, 1, 5, 61)
    with torch.no_grad():
        out, lse = flexattn.flex_attention(
            q, k, v, enable_gqa=True, return_lse=True, sinks=layer.sinks, kernel_options=options
        )
        own, weights = modeling_gpt_oss.eager_attention_forward(
            layer, q, k, v, None, layer.scaling
        )
    torch.testing.assert_close(out.transpose(1, 2), own, rtol=1e-5, atol=1e-6)
    # What the keys' weights lack to 1 is the sink's: exp(sink - lse).
    sink = (layer.sinks.detach()[:, None] - lse).exp()
    torch.testing.assert_close(1 - weights.sum(-1), sink, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "side"), [(1, "left"), (4, "left"), (4, "right"), (1, "none")], ids=str
)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_generating_again_builds_nothing(name, cache, batch, side, work):
    """The second run of a padded batch with a dynamic cache compiled its prompt's kernel anew."""
    model, (ids, mask) = tiny(name), padded(batch, side)

    def generate():
        greedy(model, "flexattn", ids, mask, 6, **CACHES[cache])

    assert all(work.of(generate))
    assert work.of(generate) == work.of(generate) == (0, 0, 0)


def test_decode_traces_nothing_once_two_tokens_are_out():
    """Positions are arguments of the kernels: no step is another kernel."""
    model, (ids, mask) = tiny("Mistral"), prompts()
    for options in CACHES.values():
        clear()
        greedy(model, "flexattn", ids, mask, 4, **options)
        before = stats().traces
        greedy(model, "flexattn", ids, mask, 12, **options)
        assert stats().traces <= before + 1, options


def test_a_model_that_generate_compiles_says_the_same():
    from transformers import CompileConfig

    model, (ids, mask) = tiny("Mistral"), prompts()
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    got = greedy(
        model, "flexattn", ids, mask, 6, cache_implementation="static", compile_config=config
    )
    assert torch.equal(got, greedy(model, "eager", ids, mask, 6))


def test_gradients_reach_every_weight():
    """Training on the CPU, where the reference differentiates; sinks learn too."""
    model, (ids, mask) = tiny("GptOss"), prompts()
    found = []
    for implementation in ("eager", "flexattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids[:1], attention_mask=mask[:1], labels=ids[:1]).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert model.model.layers[0].self_attn.sinks.grad.any()
