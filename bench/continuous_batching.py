"""`python -m bench.continuous_batching`: a run of transformers' generate_batch.

256 prompts of 100 to 4,000 tokens through eight layers of Llama 3 8B, and of gpt-oss with small
experts, with 64 new tokens each.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.command import main, named
from bench.peers import OURS
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, in_turns, wall_us
from flexattn.integrations.transformers import serve_batches

METHOD = Method(rounds=1)
SETTINGS: dict[str, Any] = {
    "num_hidden_layers": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class BatchingRow(Uncounted):
    """A model of transformers, its settings, and how many prompts and new tokens a run has."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    requests: int = 256
    tokens: int = 64
    group = "continuous-batching"


ROWS = (
    BatchingRow("llama", "Llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "head_dim": 128,
    }),
    BatchingRow("gpt-oss", "GptOss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "head_dim": 64, "sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 4,
    }),
)  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """A row, its model with random weights, and its prompts."""

    row: BatchingRow
    model: Any
    prompts: list[list[int]]


def _make(row: BatchingRow, method: Method) -> Batches:
    import transformers

    config = getattr(transformers, f"{row.model}Config")(**SETTINGS, **row.settings)
    torch.manual_seed(0)
    with torch.device(method.device):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(transformers, f"{row.model}ForCausalLM")(config)
        torch.set_default_dtype(torch.float32)
    draw = random.Random(0)
    lengths = [draw.randint(100, 4000) for _ in range(row.requests)]
    prompts = [[draw.randrange(1, 32000) for _ in range(n)] for n in lengths]
    return Batches(row, model.eval(), prompts)


@dataclass(frozen=True)
class Server:
    """A peer's implementation of attention in a row's model; a call serves a few prompts."""

    name: str
    x: Batches

    def __call__(self) -> None:
        self.us(self.x.prompts[:4], 4)

    def us(self, prompts: list[list[int]], tokens: int) -> float:
        """Microseconds of all prompts, after a run of a few that compiles and captures."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self.name == OURS:
            serve_batches(self.x.model)
        else:
            self.x.model.set_attn_implementation(self.name)
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=tokens, pad_token_id=0, eos_token_id=-1
        )
        # Warming up the graphs of the largest batches takes tens of GB beside the cache.
        config = ContinuousBatchingConfig(auto_switch_to_flash=False, max_memory_percent=0.5)
        with self.x.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            _serve(manager, prompts[:4], 4)
            return wall_us(lambda: _serve(manager, prompts, tokens))


def _serve(manager: Any, prompts: list[list[int]], tokens: int) -> None:
    for each in prompts:
        manager.add_request(each, max_new_tokens=tokens)
    done = 0
    while done < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation loop has stopped")
        done += result is not None and result.is_finished()


# transformers' tests and ours hold the tokens; a run is not judged.
BATCHING = Kind(
    _make,
    lambda call, x: Gate(True, "not judged"),
    Server,
    race=in_turns(lambda server: server.us(server.x.prompts, server.x.row.tokens)),
)


PEERS = named(OURS, "flash_attention_3", "flash_attention_2", "sdpa")
run = partial(main, "continuous_batching", ROWS, METHOD, known=PEERS, kind=BATCHING)


if __name__ == "__main__":
    sys.exit(run())
