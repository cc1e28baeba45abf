"""Tiny models of transformers with random weights, whose attention decides what they say."""

import torch

# A window shorter than what is generated, so that keys leave it.
WINDOW = 12
COMMON = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
    # Wide weights: scores and values far from uniform.
    "initializer_range": 0.4,
}  # fmt: skip
# What differs from COMMON: windows and soft-capping of Mistral and Gemma-2, sinks of gpt-oss.
MODELS = {
    "Llama": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Gemma2": {
        "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0,
    },
    "Mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "Qwen3": {"head_dim": 32},
    "GptOss": {
        "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 2,
        # All of them: which one a router takes would hang on the last bit.
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
# transformers' own sdpa refuses soft-capping, and its gpt-oss has none.
WITH_SDPA = ("Llama", "Mistral", "Qwen3")


def tiny(name, dtype=torch.float32, device="cpu", **changes):
    """A model of transformers with two layers, in eval mode: the same weights on every device."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name], **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model.to(device, dtype)


def prompts(device="cpu", length=9):
    """Two prompts, the second padded on the left: ids [2, length] and their mask."""
    ids, mask = padded(2, "left", length)
    return ids.to(device), mask.to(device)


def padded(batch, side, length=9):
    """ids [batch, length] and their mask, which removes 4 keys of the last prompt on one side."""
    ids = torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[-1, slice(4) if side == "left" else slice(-4, None)] = 0
    return ids, mask


def greedy(model, implementation, ids, mask, steps, **options):
    """ids with `steps` more tokens, each the likeliest by the model with this attention."""
    model.set_attn_implementation(implementation)
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, **options
    )


@torch.no_grad()
def logits(model, implementation, ids, mask, steps, *, static=False):
    """Logits [B, steps + 1, vocabulary] of the last token and of `steps` forced ones after it."""
    import transformers

    model.set_attn_implementation(implementation)
    forced = torch.arange(3, 3 + steps, device=ids.device).expand(ids.shape[0], -1)
    length = ids.shape[1] + steps
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=length + 5)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    found, given = [], ids
    for step in range(steps + 1):
        seen = torch.nn.functional.pad(mask, (0, step), value=1)
        places = (seen.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
        out = model(given, attention_mask=seen, position_ids=places, past_key_values=cache)
        found.append(out.logits[:, -1])
        given = forced[:, step : step + 1]
    return torch.stack(found, 1)
