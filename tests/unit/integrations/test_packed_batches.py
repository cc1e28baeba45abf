"""Packed batches of DataCollatorWithFlattening: what a model says of each sequence alone."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from flexattn.integrations import transformers as integration  # noqa: E402
from flexattn.integrations.decode_masks import window_of  # noqa: E402
from tests.models import WINDOW, tiny  # noqa: E402

LENGTHS = (17, 1, 30)


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()


def sequences():
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(1, 96, (n,), generator=draw) for n in LENGTHS]


def packed(**more):
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **more)
    batch = collate([{"input_ids": each.tolist()} for each in sequences()])
    batch.pop("labels")
    return dict(batch)


def logits(model, **batch):
    return model(use_cache=False, **batch).logits[0]


@pytest.mark.parametrize("positions", [True, False], ids=["positions", "lengths alone"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_a_pack_says_what_each_sequence_says(name, positions, monkeypatch):
    model = tiny(name)
    model.set_attn_implementation("eager")
    alone = torch.cat([logits(model, input_ids=each[None]) for each in sequences()])
    model.set_attn_implementation("flexattn")
    windows, call = [], integration.varlen_attn

    def watched(*args, **kwargs):
        windows.append(kwargs["window"])
        return call(*args, **kwargs)

    monkeypatch.setattr(integration, "varlen_attn", watched)
    batch = packed()
    if not positions:  # as given, models that rotate keys would count on over the pack
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    torch.testing.assert_close(logits(model, **batch), alone, rtol=1e-3, atol=1e-3)
    assert len(windows) == 2 and set(windows) <= {(-1, 0), (WINDOW - 1, 0)}
    assert ((WINDOW - 1, 0) in windows) == (name != "Llama")


def test_gradients_of_a_pack_are_those_of_its_sequences():
    model, found = tiny("GptOss").train(), []
    for implementation in ("eager", "flexattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        if implementation == "eager":
            parts = [logits(model, input_ids=each[None]) for each in sequences()]
        else:
            parts = [logits(model, **packed())]
        torch.cat(parts).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_windows_that_are_known():
    near = masking_utils.sliding_window_causal_mask_function(5)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    inside = masking_utils.packed_sequence_compatibility_function(near, ids, ids)
    assert window_of(near) == window_of(inside) == (4, 0)
    assert window_of(masking_utils.causal_mask_function) == (-1, 0)
    assert window_of(masking_utils.bidirectional_mask_function) == (-1, -1)
    chunks = masking_utils.chunked_causal_mask_function(4, ids[0])
    for other in (chunks, masking_utils.or_masks(near), masking_utils.and_masks(near, chunks), 3):
        assert window_of(other) is None


def test_other_masks_go_on_as_they_are(monkeypatch):
    """A pack with padding, or with a mask of its own, is computed by its mask."""
    monkeypatch.setattr(integration, "varlen_attn", None)
    model = tiny("Llama")
    model.set_attn_implementation("flexattn")
    mask = torch.ones(1, sum(LENGTHS), dtype=torch.int64)
    mask[0, :4] = 0
    logits(model, **packed(), attention_mask=mask)
