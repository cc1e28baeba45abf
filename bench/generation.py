"""`python -m bench.generation`: milliseconds a token of generate(), by attention implementation.

Models of transformers with random weights: Llama's shape with both caches, its prompts padded or
not, beside sdpa; Gemma-2's and gpt-oss's beside their own eager. A token's time is the mean of 64,
at lengths that no call had before; with a static cache transformers compiles the model by itself.
Logits of the first 16 tokens are held to a float32 model's, all fed with its tokens: errors up to
twice the rival's pass. FREE is the model without attention, each query its own answer: what no
attention is faster than.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.environment import describe
from bench.peers import OURS
from bench.results import Gate, Report, RowResult, save
from bench.runner import Method
from flexattn.frontend.launch_cache import launch_cache
from flexattn.integrations.transformers import register
from flexattn.measure.timing import Samples, paired_ratio

__all__ = ["FREE", "ROWS", "GenerationRow", "main", "table"]

SHORT, LONG = 16, 80
FREE = "no attention"
_FREE = "bench_no_attention"
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
class GenerationRow:
    """A model, a cache, and whether half of the prompts are padded on the left."""

    model: str
    rival: str
    padded: bool = False
    batch: int = 4
    prompt: int = 1000
    options: dict[str, Any] = field(default_factory=dict)

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


def _ms_a_token(model: Any, row: GenerationRow, given: tuple[Tensor, Tensor]) -> float:
    """Of the tokens after the first SHORT; lengths are as new to ours as those of other texts."""
    launch_cache.forget_lengths()
    prompt, at = given[0].shape[1], []

    def stamp(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] - prompt in (SHORT, LONG):
            torch.cuda.synchronize()
            at.append(time.perf_counter())
        return scores

    _generated(model, row, given, LONG + 1, logits_processor=[stamp])
    begin, end = at
    return (end - begin) / (LONG - SHORT) * 1e3


def measure(row: GenerationRow, rounds: int) -> RowResult:
    """Ours and the rival in turns, on one model's weights."""
    # Rows share what is compiled in transformers: past the limit of its variants all run eagerly.
    torch.compiler.reset()
    given, logits, ms = _prompts(row), {}, {}
    exact, tokens = _exact(row, given)
    models = {}
    for name in (OURS, row.rival, FREE):
        models[name] = _model(row.model)
        models[name].set_attn_implementation(_FREE if name == FREE else name)
        if name != FREE:
            logits[name] = _logits(models[name], row, given, tokens)[0]
        for count in (SHORT, LONG):
            _generated(models[name], row, given, count)
        ms[name] = [0.0] * rounds
    for i in range(rounds):
        for name, model in models.items():
            ms[name][i] = _ms_a_token(model, row, given)
    samples = {name: Samples(tuple(each * 1e3 for each in found)) for name, found in ms.items()}
    gate = judge(logits[OURS], logits[row.rival], exact, row.rival)
    return RowResult(row.name, "generation", 0.0, 0, {OURS: gate}, samples, {})


def register_free() -> None:
    """Let models be made without attention: each query is its own answer, and no mask is made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, query: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_FREE, attend)
    AttentionMaskInterface.register(_FREE, lambda *args, **more: None)


def _exact(row: GenerationRow, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and tokens of the same weights in float32, by the rival's attention."""
    model = _model(row.model, torch.float32)
    model.set_attn_implementation(row.rival)
    return _logits(model, replace(row, options={}), given, None)


def table(report: Report) -> str:
    """A line each row: milliseconds a token, ours over the rival's, and without attention."""
    lines = []
    for row in report.rows:
        (rival,) = set(row.samples) - {OURS, FREE}
        ratio = paired_ratio(row.samples[OURS], row.samples[rival])
        ours, theirs = (row.samples[name].median / 1e3 for name in (OURS, rival))
        least = ""
        if FREE in row.samples:
            least = f", {FREE} {paired_ratio(row.samples[FREE], row.samples[rival]).value:.3f}"
        lines.append(
            f"{row.name}: {OURS} {ours:.3f} ms a token, {rival} {theirs:.3f}: {ratio.value:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f}){least}; {row.gates[OURS].message}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the status is 1 where logits are further off than that, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__)
    parser.add_argument("--rows", default="", help="a regular expression of names")
    parser.add_argument("--rounds", type=int, default=METHOD.rounds)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: tokens are timed on one", file=sys.stderr)
        return 2
    register(OURS)
    register_free()
    found: list[RowResult] = []
    method = replace(METHOD, rounds=asked.rounds).facts()
    for row in ROWS:
        if re.search(asked.rows, row.name):
            found.append(measure(row, asked.rounds))
            report = Report("generation", method, (describe(),), tuple(found))
            if asked.out:
                save(report, asked.out)
            print(table(replace(report, rows=(found[-1],))), flush=True)
            torch.cuda.empty_cache()
    return 0 if all(row.gates[OURS].passed for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
