"""`python -m bench.continuous_batching`: tokens a second of transformers' generate_batch."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.time_limit import time_limit
from flexattn.errors import InputError
from flexattn.integrations.transformers import PAGED, serve_batches

# Llama 3 8B's layers, and those of gpt-oss with small experts: attention's shapes are theirs.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "head_dim": 128,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "head_dim": 64, "sliding_window": 128, "num_local_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
}  # fmt: skip
COMMON = {
    "num_hidden_layers": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
OURS = "flexattn"


def main(argv: Sequence[str] | None = None) -> int:
    """Time each implementation over the same prompts, and say what each gives a second."""
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        print(InputError("no GPU is visible to torch", "a bench times a GPU"), file=sys.stderr)
        return 2
    for shape in args.shapes.split(","):
        model = _model(shape)
        draw = random.Random(0)
        lengths = [draw.randint(100, 4000) for _ in range(args.requests)]
        prompts = [[draw.randrange(1, 32000) for _ in range(n)] for n in lengths]
        print(f"{shape}: {args.requests} prompts, {sum(lengths)} tokens", flush=True)
        for name in args.peers.split(","):
            try:
                with time_limit():
                    taken, made = _run(model, name, prompts, args.tokens)
            except Exception as error:  # a peer that is not there is said, and the others run
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            read = sum(lengths) + made
            print(
                f"  {name}: {taken:.2f} s, {made / taken:.0f} new tokens a second, "
                f"{read / taken:.0f} with prompts",
                flush=True,
            )
            gc.collect()
            torch.cuda.empty_cache()
        del model
    return 0


def _model(shape: str) -> Any:
    import transformers

    kind, changes = SHAPES[shape]
    config = getattr(transformers, f"{kind}Config")(**COMMON, **changes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def _run(model: Any, name: str, prompts: list[list[int]], tokens: int) -> tuple[float, int]:
    """Seconds, and new tokens, after a run of a few prompts that compiles and captures."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if name == OURS:
        serve_batches(model)
    else:
        model.set_attn_implementation(name)
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=-1
    )
    # Warming up the graphs of the largest batches takes tens of GB beside the cache.
    config = ContinuousBatchingConfig(auto_switch_to_flash=False, max_memory_percent=0.5)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        _served(manager, prompts[:4], 4)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = _served(manager, prompts, tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - begin, made


def _served(manager: Any, prompts: list[list[int]], tokens: int) -> int:
    for each in prompts:
        manager.add_request(each, max_new_tokens=tokens)
    made = done = 0
    while done < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation loop has stopped")
        if result is not None and result.is_finished():
            done += 1
            made += len(result.generated_tokens)
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.continuous_batching")
    add = parser.add_argument
    add("--shapes", default=",".join(SHAPES), help="out of llama, gpt-oss")
    peers = f"{OURS},flash_attention_3,flash_attention_2,sdpa"
    add("--peers", default=peers, help=f"{OURS} is {PAGED}; the others by transformers' names")
    add("--requests", type=int, default=256, help="prompts of 100 to 4,000 tokens")
    add("--tokens", type=int, default=64, help="new tokens of each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
