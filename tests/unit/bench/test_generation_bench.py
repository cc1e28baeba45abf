"""The gate of bench.generation, on a small model on the CPU."""

import torch

from bench import generation
from bench.generation import GenerationRow, judge

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def test_logits_may_be_twice_as_far_off_as_the_rivals():
    exact = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    off = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(2)) * 1e-2
    assert judge(exact + 1.9 * off, exact + off, exact, "eager").passed
    refused = judge(exact + 2.1 * off, exact + off, exact, "eager")
    assert not refused.passed and "eager's by 0.97%" in refused.message
    assert not judge(exact + float("nan"), exact + off, exact, "eager").passed


def test_all_are_fed_with_the_float32_models_tokens(monkeypatch):
    """A model of other weights then sees the same text, and its own first choice is not taken."""
    monkeypatch.setitem(generation.MODELS, "Llama", SMALL)
    monkeypatch.setattr(generation, "SHORT", 5)
    monkeypatch.setattr(generation, "DEVICE", "cpu")
    row = GenerationRow("Llama", "eager", padded=True, batch=2, prompt=20)
    given = generation._prompts(row)
    exact, tokens = generation._exact(row, given)
    again, fed = generation._logits(generation._model("Llama", torch.float32), row, given, tokens)
    assert torch.equal(fed, tokens) and torch.allclose(again, exact, atol=1e-5)
    other, forced = generation._logits(
        generation._model("Llama", torch.float32), row, given, tokens.flip(0)
    )
    assert torch.equal(forced, tokens.flip(0))
    assert torch.allclose(other[0], exact[0], atol=1e-5)
    assert not torch.allclose(other[1:], exact[1:], atol=1e-3)
