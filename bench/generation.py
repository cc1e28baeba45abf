"""`python -m bench.generation`: milliseconds a token of generate(), by attention implementation.

Models of transformers with random weights: Llama's shape with both caches, its prompts padded or
not, beside sdpa; Gemma-2's and gpt-oss's beside their own eager. A token's time is the mean of 64,
at lengths that no call had before; with a static cache transformers compiles the model by itself.
Logits of the first 16 tokens are held to a float32 model's, all fed with its tokens: errors up to
twice the rival's pass.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.command import main, named
from bench.peers import OURS, Refusal
from bench.results import Gate
from bench.runner import Kind, Method, Uncounted, in_turns
from flexattn.frontend.launch_cache import launch_cache
from flexattn.integrations.transformers import register
from flexattn.runtime.launch import launches

SHORT, LONG = 16, 80
# Of the rival's error of the logits, as everywhere in the gate: see docs/gate.md.
SLACK = 2.0
METHOD = Method(rounds=7)
DEVICE = "cuda"
# Four layers of the published shapes; experts and vocabularies are small, for attention is asked.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "Gemma2": {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "GptOss": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
STATIC = {"cache_implementation": "static"}


@dataclass(frozen=True)
class GenerationRow(Uncounted):
    """A model, a cache, and whether half of the prompts are padded on the left."""

    model: str
    rival: str
    padded: bool = False
    batch: int = 4
    prompt: int = 1000
    options: dict[str, Any] = field(default_factory=dict)
    group = "generation"

    @property
    def name(self) -> str:
        """As --rows matches it."""
        cache = "static" if self.options else "dynamic"
        return f"{self.model.lower()}-{cache}{'-padded' if self.padded else ''}"


ROWS = (
    GenerationRow("Llama", "sdpa"),
    GenerationRow("Llama", "sdpa", padded=True),
    GenerationRow("Llama", "sdpa", options=STATIC),
    GenerationRow("Llama", "sdpa", padded=True, options=STATIC),
    GenerationRow("Gemma2", "eager", prompt=4000),
    GenerationRow("Gemma2", "eager", prompt=4000, options=STATIC),
    GenerationRow("GptOss", "eager", prompt=4000),
    GenerationRow("GptOss", "eager", prompt=4000, options=STATIC),
)


def _model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=4096, num_hidden_layers=4, max_position_embeddings=8192, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, **MODELS[name],
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(DEVICE):
        made = getattr(transformers, f"{name}ForCausalLM")(config)
    return made.eval().to(torch.bfloat16).to(dtype)


def _prompts(row: GenerationRow) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 4096, (row.batch, row.prompt), generator=draw)
    mask = torch.ones_like(ids)
    if row.padded:
        mask[::2, : row.prompt // 10] = 0
    return ids.to(DEVICE), mask.to(DEVICE)


def _generated(
    model: Any, row: GenerationRow, given: tuple[Tensor, Tensor], tokens: int, **more: Any
) -> Any:
    ids, mask = given
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
        **row.options, **more,
    )  # fmt: skip


def _logits(
    model: Any, row: GenerationRow, given: tuple[Tensor, Tensor], forced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits [SHORT, B, vocabulary] before anything is done to them, and the tokens [B, SHORT].

    forced: tokens [B, SHORT] that are fed in place of the model's own.
    """
    prompt = given[0].shape[1]

    def only(ids: Tensor, scores: Tensor) -> Tensor:
        assert forced is not None
        wanted = forced[:, ids.shape[1] - prompt, None]
        return torch.full_like(scores, float("-inf")).scatter(1, wanted, 0.0)

    more = {} if forced is None else {"logits_processor": [only]}
    found = _generated(
        model, row, given, SHORT, output_logits=True, return_dict_in_generate=True, **more
    )
    return torch.stack(found.logits).float(), found.sequences[:, prompt:]


def judge(ours: Tensor, rivals: Tensor, exact: Tensor, rival: str) -> Gate:
    """The gate of logits of one shape: the root of their mean squared error, and the rival's."""
    mine, theirs = ((found - exact).square().mean().sqrt().item() for found in (ours, rivals))
    of = exact.square().mean().sqrt().item()
    said = f"logits off by {mine / of:.2%} of float32's, {rival}'s by {theirs / of:.2%}"
    return Gate(mine <= SLACK * theirs, said)


@dataclass(frozen=True)
class Prompted:
    """A row's prompts, the exact logits and tokens after them, and the logits of its peers."""

    row: GenerationRow
    given: tuple[Tensor, Tensor]
    exact: Tensor
    tokens: Tensor
    logits: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Generator:
    """A peer's model of a row; a call generates."""

    name: str
    model: Any
    x: Prompted

    def __call__(self) -> None:
        for count in (SHORT, LONG):
            _generated(self.model, self.x.row, self.x.given, count)


def _us_a_token(found: Generator) -> float:
    """Of the tokens after the first SHORT; lengths are as new to ours as those of other texts."""
    for _, entries in launch_cache._calls.items():  # a decode is known by its next length
        for entry in entries:
            entry.launches.clear()
            entry.last = None, None
    launches.clear()
    prompt, at = found.x.given[0].shape[1], []

    def stamp(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] - prompt in (SHORT, LONG):
            torch.cuda.synchronize()
            at.append(time.perf_counter())
        return scores

    _generated(found.model, found.x.row, found.x.given, LONG + 1, logits_processor=[stamp])
    begin, end = at
    return (end - begin) / (LONG - SHORT) * 1e6


def _make(row: GenerationRow, method: Method) -> Prompted:
    # Rows share what is compiled in transformers: past the limit of its variants all run eagerly.
    torch.compiler.reset()
    given = _prompts(row)
    return Prompted(row, given, *_exact(row, given))


def _prepare(name: str, x: Prompted) -> Generator | Refusal:
    if name not in (x.row.rival, OURS):
        return Refusal(f"its rival is {x.row.rival}")
    model = _model(x.row.model)
    model.set_attn_implementation(name)
    x.logits[name] = _logits(model, x.row, x.given, x.tokens)[0]
    return Generator(name, model, x)


def _judge(found: Generator, x: Prompted) -> Gate:
    rival = x.row.rival
    if rival not in x.logits:
        return Gate(True, f"not judged: {rival} gave no logits")
    return judge(x.logits[OURS], x.logits[rival], x.exact, rival)


def _exact(row: GenerationRow, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and tokens of the same weights in float32, by the rival's attention."""
    model = _model(row.model, torch.float32)
    model.set_attn_implementation(row.rival)
    return _logits(model, replace(row, options={}), given, None)


GENERATION = Kind(_make, _judge, _prepare, race=in_turns(_us_a_token))


# A gate compares ours with the rival, which therefore comes first.
PEERS = named("sdpa", "eager", OURS)
run = partial(main, "generation", ROWS, METHOD, known=PEERS, kind=GENERATION)


if __name__ == "__main__":
    register(OURS)
    sys.exit(run())
