"""Every architecture of transformers that can be built tiny, with flexattn beside eager and sdpa.

    python -m tests.transformers_sweep --seconds 540 --out sweep.jsonl

runs forwards with and without padding, and `generate` with both caches, on the CPU. The same
command goes on where the last one ended; at the end it prints what is not right. Verdicts: right,
refused (in our words), wrong, crash (where eager or sdpa works), own (as crash, of a model that
transformers gives no other attention), none (where neither works).
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import FlexAttnError
from flexattn.integrations.transformers import register

# Sizes by the names that configs have for them.
_SIZES: dict[int, str] = {
    1: "first_k_dense_replace n_group topk_group num_shared_experts n_shared_experts "
    "moe_num_shared_experts num_nextn_predict_layers shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth "
    "num_decoder_layers num_key_value_heads num_experts_per_tok index_n_heads moe_topk "
    "num_conv_pos_embedding_groups num_encoder_layers moe_k linear_num_key_heads "
    "linear_num_value_heads num_global_key_value_heads",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads attention_heads "
    "decoder_attention_heads index_topk num_experts n_routed_experts num_local_experts "
    "moe_num_experts num_codebooks codebook_dim decoder_num_attention_heads num_queries "
    "encoder_num_attention_heads",
    6: "sliding_window attention_chunk_size",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv index_head_dim patch_size "
    "num_mel_bins global_head_dim linear_key_head_dim linear_value_head_dim swa_head_dim",
    16: "q_lora_rank kv_lora_rank image_size num_conv_pos_embeddings feature_size embedding_size "
    "mamba_d_state state_size pooler_output_size",
    32: "hidden_size d_model n_embd embed_dim hidden_dim moe_intermediate_size projection_dim dim "
    "decoder_hidden_size output_hidden_size out_hidden_size cross_attention_dim codebook_size "
    "projector_hidden_size encoder_hidden_size text_hidden_size conv_dim_out "
    "hidden_size_per_layer_input",
    64: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff mlp_dim n_inner ffn_hidden"
    "_size shared_intermediate_size max_source_positions decoder_intermediate_size n_hidden",
    99: "vocab_size text_vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions max_target_positions",
}
_KNOWN: dict[str, object] = {
    name: size for size, names in _SIZES.items() for name in names.split()
}
_KNOWN |= {
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "conv_dim": [16, 16], "conv_kernel": [3, 3],
    "conv_stride": [2, 2], "attn_layers": ["local", "local"],
}  # fmt: skip
# What replaces sizes where a model cannot be built or run with them: some have rules between them.
_OTHER_SIZES: tuple[dict[str, Any], ...] = (
    {}, {"num_key_value_heads": 4}, {"head_dim": None}, {"head_dim": 16},
    {"num_key_value_heads": 4, "head_dim": None}, {"sliding_window": None, "head_dim": None},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
    {"hidden_size": 512, "out_hidden_size": 512, "head_dim": 128},  # parts of rotary positions
)  # fmt: skip
_MOST = 40_000_000  # parameters of what is tiny
_AUTO = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "MultimodalLM", "MaskedLM", "")
_TOLERANCE = 1e-3  # of the largest number; float32 on the CPU is right to 1e-5
CALLS = ("plain", "padded", "generate", "static")


class Verdict(NamedTuple):
    """A word of the module's docstring, with the largest error or an exception's first line."""

    word: str
    told: str


def sizes(config_class: Any, deep: int = 3) -> dict[str, Any]:
    """Keywords that make a config small, and the configs inside it."""
    known = inspect.signature(config_class.__init__).parameters
    found = {name: value for name, value in _KNOWN.items() if name in known}
    inner = getattr(config_class, "sub_configs", {})
    default = config_class() if inner and deep else None
    for name in inner:
        each = getattr(default, name, None)
        if each is not None:
            found[name] = {"model_type": each.model_type, **sizes(type(each), deep - 1)}
    return found


def tiny(name: str, **changes: Any) -> Any:
    """A small model of an architecture in eval mode, of the first sizes with which eager runs.

    Of a model that no sizes make run, the last that was built; None where none was.
    """
    built = None
    for other in _OTHER_SIZES:
        config = _config(name, other | changes)
        for model in () if config is None else _models(config):
            built = model
            try:
                answer(model, "eager", "plain")
            except Exception:
                continue
            return model
    return built


def _models(config: Any) -> Iterator[Any]:
    import transformers

    for kind in _AUTO:
        auto = getattr(transformers, f"AutoModel{kind and 'For' + kind}")
        if type(config) not in auto._model_mapping:
            continue
        try:
            with torch.device("meta"):
                shape = auto.from_config(config, attn_implementation="eager")
            if sum(each.numel() for each in shape.parameters()) <= _MOST:
                torch.manual_seed(0)
                yield auto.from_config(config, attn_implementation="eager").eval()
        except Exception:
            continue


def _config(name: str, changes: dict[str, Any]) -> Any:
    """A config of these sizes, without those that its class refuses by name."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        given = _with(sizes(CONFIG_MAPPING[name]), changes)
    except Exception:
        return None
    for _ in range(8):
        try:
            return AutoConfig.for_model(name, **given)
        except Exception as error:
            found = re.search(r"[Ff]ield '(\w+)'", str(error))
            if found is None:
                return None
            given = _with(given, {found[1]: None})
    return None


def _with(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Keywords, those of configs inside too, with others in place of some; None leaves one out."""
    found = {}
    for name, value in given.items():
        value = _with(value, changes) if isinstance(value, dict) else changes.get(name, value)
        if value is not None:
            found[name] = value
    return found


def inputs(model: Any) -> dict[str, Tensor]:
    """Ids [2, 13] of a batch, or pixels or sound of random numbers."""
    config, draw = model.config, torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        inner = getattr(config, "vision_config", config)
        size = getattr(inner, "image_size", 16)
        size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        shape = (2, getattr(inner, "num_channels", 3), *size)
        return {"pixel_values": torch.randn(shape, generator=draw)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, generator=draw)}
    if model.main_input_name in ("input_features", "input_mel"):
        mels = getattr(config, "num_mel_bins", 8)
        length = 2 * getattr(config, "max_source_positions", 32)
        shape = (mels, length) if hasattr(config, "max_source_positions") else (64, mels)
        found = {model.main_input_name: torch.randn(2, *shape, generator=draw)}
        ids = torch.randint(3, 90, (2, 13), generator=draw)
        return found | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    ids = torch.randint(3, 90, (2, 13), generator=draw)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def padding() -> Tensor:
    """The mask of `inputs`, of which the second prompt has five tokens less."""
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :5] = 0
    return mask


@torch.no_grad()
def answer(model: Any, implementation: str, call: str) -> Tensor:
    """What a call of CALLS gives, where it is no padding."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)
    else:
        weights = model.state_dict()
        config = copy.deepcopy(model.config)
        model = type(model)._from_config(config, attn_implementation=implementation).eval()
        model.load_state_dict(weights)
    given = inputs(model)
    torch.manual_seed(0)
    if call in ("generate", "static"):
        given.pop("decoder_input_ids", None)
        if "input_ids" in given:
            given["attention_mask"] = padding()
        found = model.generate(
            **given, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
            cache_implementation="static" if call == "static" else None,
        )  # fmt: skip
        return torch.stack(found.logits)
    kept = torch.ones(2, 13, dtype=torch.bool)
    if call == "padded":
        if "input_ids" not in given:
            raise TypeError("no text")
        given["attention_mask"] = padding()
        kept = kept if model.config.is_encoder_decoder else padding().bool()
    found = model(**given)
    out = next(each for each in found.values() if isinstance(each, Tensor) and each.dim() > 1)
    return out[kept] if out.shape[:2] == kept.shape else out


def verdict(model: Any, call: str) -> Verdict:
    """One call of one model with flexattn, beside what eager and sdpa give."""
    wanted: list[Tensor] = []
    told = ""
    for name in ("eager", "sdpa"):
        try:
            found = answer(model, name, call)
        except Exception as error:
            told = told or _line(error)
        else:
            wanted += [found] if bool(found.isfinite().any()) else []
    if not wanted:
        return Verdict("none", told)
    try:
        got = answer(model, "flexattn", call)
    except FlexAttnError as error:
        return Verdict("refused", str(error).replace("\n", " "))
    except Exception as error:
        return Verdict("crash" if model._can_set_attn_implementation() else "own", _line(error))
    error = min(_error(got, each) for each in wanted)
    return Verdict("right" if error < _TOLERANCE else "wrong", f"{error:.1e}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _error(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    got, wanted = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in (got, wanted))
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))


class _OutOfTime(BaseException):
    """A model took longer than its share."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: what is raised while an object is finalised, Python drops.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def sweep(names: list[str], seconds: float, tell: Callable[[str, str, Verdict], None]) -> None:
    """Tell the verdict of each call of each architecture, until the time is over."""
    register()
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            return
        try:
            with _limit(90):
                model = tiny(name)
                calls = CALLS if hasattr(model, "generate") else CALLS[:2]
                if model is None:
                    tell(name, "", Verdict("none", "not built"))
                    continue
                for call in calls:
                    tell(name, call, verdict(model, call))
        except _OutOfTime:
            tell(name, "", Verdict("none", "out of time"))


def main() -> None:
    """Sweep, and print a table of what is not right."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("transformers_sweep.jsonl"))
    parser.add_argument("names", nargs="*", help="architectures, without which it tries all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    rows = []
    if options.out.exists() and not options.names:
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {row[0] for row in rows[:-1]}
    rows = [row for row in rows if row[0] in done]

    def tell(name: str, call: str, found: Verdict) -> None:
        rows.append([name, call, *found])
        with options.out.open("a") as file:
            print(json.dumps(rows[-1]), file=file)

    names = options.names or [name for name in CONFIG_MAPPING_NAMES if name not in done]
    sweep(names, options.seconds, tell)
    for name, call, word, told in rows:
        if word not in ("right", "none") or options.names:
            print(f"{name:28} {call:9} {word:8} {told}")
    print(
        len({row[0] for row in rows}),
        "of",
        len(CONFIG_MAPPING_NAMES),
        Counter(row[2] for row in rows),
    )


if __name__ == "__main__":
    main()
