"""Prompts of many lengths through generate_batch, and through generate one by one."""

import random

import torch

from flexattn.integrations.transformers import serve_batches


def drawn_prompts(lengths, vocabulary=96):
    """Token ids of prompts of these lengths."""
    draw = random.Random(1)
    return [[draw.randrange(1, vocabulary) for _ in range(n)] for n in lengths]


def one_by_one(model, prompts, steps, implementation="eager"):
    """What generate says behind each prompt."""
    model.set_attn_implementation(implementation)
    found = []
    for each in prompts:
        ids = torch.tensor([each], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps
        )
        found.append(out[0, len(each) :].tolist())
    return found


def batched(model, prompts, steps, **config):
    """What generate_batch says behind each prompt, over this library's attention."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    serve_batches(model)
    said = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=steps, pad_token_id=0, eos_token_id=-1
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
        progress_bar=False,
    )
    place = lambda each: int(str(each.request_id).rsplit("_", 1)[-1])  # noqa: E731
    return [each.generated_tokens for each in sorted(said.values(), key=place)]
