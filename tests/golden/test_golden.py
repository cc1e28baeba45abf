"""Rendered kernels beside the ones that someone read and accepted: `make golden` accepts."""

import difflib
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import (
    alibi,
    causal,
    document,
    natten_2d,
    prefix_lm,
    relative_bias,
    sliding_window,
    softcap,
)
from flexattn.device import named
from flexattn.kernels.block_mask.source import render_block_mask
from flexattn.kernels.cache_append.source import render_append, render_quantize
from flexattn.kernels.decay_skip.source import render_blocks, render_norms, render_window
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.source import render_transposed_values, render_wide_values
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.merges import render_join
from flexattn.kernels.paged_decode.source import render_serving
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.kernels.triton.source import render_combine
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.kernels.triton_backward.source import render_delta
from flexattn.mods import bind
from flexattn.mods.derivative import loaded_floats
from flexattn.problem import Layout, captures_of
from flexattn.problem.serving import AppendForm, RopeForm, ServingForm
from tests.cases import causal_score
from tests.families import render
from tests.problems import problem

FILES = Path(__file__).parent / "files"
DEVICE = named("nvidia-h200")
PREFILL = PrefillConfig(128, 64, 4, 3)
TMA = PrefillConfig(128, 64, 4, 2, use_tma=True)
HOPPER = HopperPrefillConfig(2, 128, 2, 240)
TAKEN = HopperPrefillConfig(
    3, 128, 2, 160, ping_pong=True, tile_scheduler="dynamic", order="sections"
)
DECODE = DecodeConfig(16, 64, 4, 3)
BACKWARD = BackwardConfig(64, 128, 128, 64, 8, 2)


def per_head(b, h, q_idx, kv_idx):
    return q_idx + h >= kv_idx


def kernel(config, kind="prefill", *args, **kwargs):
    return render(problem(kind, *args, **kwargs).structure, config, DEVICE, "golden")


def with_gradients(**mods):
    structure = problem("backward", block=(48, 80), lse=False, **mods).structure
    structure = replace(structure, grads=loaded_floats(structure.score.mod))
    return render(structure, BackwardConfig(32, 32, 64, 32), DEVICE, "golden")


def block_mask(mask_mod, block):
    return render_block_mask(captures_of(bind(mask_mod, "mask")), *block, DEVICE)


STRIDED = Layout(False, True, False, False)
GOLDENS = {
    "prefill_noop": lambda: kernel(PREFILL),
    "prefill_relative_bias": lambda: kernel(
        replace(PREFILL, order="first"),
        D=64,
        score_mod=relative_bias(torch.zeros(32, 64), 32),
        lse=False,
    ),
    "prefill_causal_score_192_128": lambda: kernel(
        PREFILL, D=192, Dv=128, score_mod=causal_score, lse=False
    ),
    "prefill_ragged_blocks": lambda: kernel(
        PrefillConfig(64, 32, 4, 2), D=64, mask_mod=causal, block=(48, 80)
    ),
    "prefill_no_full_blocks_sinks": lambda: kernel(
        replace(PREFILL, order="group"), D=64, mask_mod=causal, has_full=False, sinks="bfloat16"
    ),
    "prefill_runs_window": lambda: kernel(TMA, mask_mod=sliding_window(1024), runs=True),
    "prefill_runs_document": lambda: kernel(
        replace(TMA, BLOCK_M=64),
        mask_mod=and_masks(document(torch.zeros(8).int()), causal),
        runs=True,
        lse=False,
    ),
    "prefill_runs_alibi": lambda: kernel(
        TMA, score_mod=alibi(32, "cpu"), mask_mod=causal, runs=True, lse=False
    ),
    "decay_window_alibi": lambda: render_window(
        problem(score_mod=alibi(32, "cpu")).structure, DEVICE
    ),
    "decay_blocks_alibi": lambda: render_blocks(
        problem("backward", score_mod=alibi(32, "cpu"), mask_mod=causal, runs=True).structure,
        64,
        128,
        DEVICE,
    ),
    "norms_96": lambda: render_norms(problem(D=96, score_mod=alibi(32, "cpu")).structure, DEVICE),
    "decode_runs_prefix": lambda: kernel(
        DECODE, "decode", mask_mod=prefix_lm(torch.zeros(2).long()), runs=True
    ),
    "prefill_strided_fp32": lambda: kernel(PREFILL, D=80, dtype="float32", layout=STRIDED),
    "prefill_bf16x6": lambda: kernel(PREFILL, D=64, dtype="float32", fp32_products="bf16x6"),
    "gluon_noop": lambda: kernel(HOPPER),
    "gluon_lazy_rescale": lambda: kernel(replace(HOPPER, BLOCK_N=32, lazy_rescale=True), D=64),
    "gluon_lists_softcap_192_128": lambda: kernel(
        HOPPER, D=192, Dv=128, score_mod=softcap(50.0), mask_mod=causal
    ),
    "gluon_runs_alibi": lambda: kernel(
        TAKEN, D=64, score_mod=alibi(32, "cpu"), mask_mod=causal, runs=True
    ),
    "gluon_wide": lambda: kernel(
        HopperPrefillConfig(1, 64, 1, 232, v_parts=2, k_parts=2), D=512, lse=False
    ),
    "gluon_runs_document": lambda: kernel(
        replace(HOPPER, tile_scheduler="dynamic"),
        mask_mod=and_masks(document(torch.zeros(8).int()), causal),
        runs=True,
        lse=False,
    ),
    "gluon_256_window": lambda: kernel(
        replace(HOPPER, BLOCK_N=64),
        D=256,
        mask_mod=sliding_window(1024),
        runs=True,
        lse=False,
    ),
    "gluon_relative_bias": lambda: kernel(
        replace(HOPPER, tile_scheduler="static"),
        score_mod=relative_bias(torch.zeros(32, 64), 32),
    ),
    "gluon_fp8_causal_sinks": lambda: kernel(
        HOPPER, dtype="float8_e4m3fn", mask_mod=causal, runs=True, sinks="bfloat16"
    ),
    "wide_values": lambda: render_wide_values(96, DEVICE),
    "transposed_values": lambda: render_transposed_values(96, DEVICE),
    "backward_noop": lambda: kernel(BACKWARD, "backward", lse=False),
    "backward_tma_runs_softcap": lambda: kernel(
        replace(BACKWARD, use_tma=True),
        "backward",
        score_mod=softcap(50.0),
        mask_mod=causal,
        runs=True,
        lse=False,
    ),
    "backward_lists_relative_bias": lambda: with_gradients(
        score_mod=relative_bias(torch.zeros(32, 64), 32), mask_mod=causal, D=192, Dv=128
    ),
    "delta_through_lse": lambda: render_delta(problem("backward").structure, DEVICE, True),
    "decode_noop": lambda: kernel(DECODE, "decode"),
    "decode_alibi_per_head_mask": lambda: kernel(
        DECODE, "decode", score_mod=alibi(32, "cpu"), mask_mod=per_head, per_head=True
    ),
    "combine_sinks_80": lambda: render_combine(
        problem("decode", D=80, sinks="float32").structure, DEVICE
    ),
    "serving_join_scaled_80": lambda: render_join(
        ServingForm(
            dtype="bfloat16",
            kv_dtype="float8_e4m3fn",
            head_dim_qk=80,
            head_dim_v=80,
            group=4,
            kv_heads=8,
            page=16,
            requests=1,
            rows=128,
            scaled=True,
            prefix=True,
            lse=True,
        ),
        ServingConfig(64, 64, 4, 3, 1, combine="launch"),
        DEVICE,
    ),
    "serving_token_head_scales": lambda: render_serving(
        ServingForm(
            dtype="bfloat16",
            kv_dtype="float8_e4m3fn",
            head_dim_qk=128,
            head_dim_v=128,
            group=4,
            kv_heads=8,
            page=16,
            requests=64,
            rows=4,
            scales="token_head",
        ),
        ServingConfig(16, 64, 4, 3, 2, combine="launch"),
        DEVICE,
        "golden",
    ),
    "cache_append_token_head_rope": lambda: render_append(
        AppendForm(
            "bfloat16",
            "float8_e4m3fn",
            128,
            128,
            8,
            16,
            "ragged table",
            "token_head",
            RopeForm(64, False, "float32"),
        ),
        named("nvidia-a100"),
    ),
    "quantize_smooth_blocks": lambda: render_quantize(
        "bfloat16", 96, 64, True, True, True, True, named("nvidia-a100")
    ),
    "block_mask_natten": lambda: block_mask(natten_2d(64, 48, 5), (128, 128)),
    "block_mask_document": lambda: block_mask(document(torch.zeros(8).int()), (48, 80)),
}


def rendered(name):
    """The kernel without what changes where nothing that is shown does.

    That is the hash of its template, and the glossary, which the template begins with.
    """
    head, code = re.split(r"(?m)^(?=import |from )", GOLDENS[name]().text, maxsplit=1)
    facts = re.match(r"(?s).*^# (?:pass|template): [^\n]+\n", head, re.MULTILINE)[0]
    return re.sub(r"(?m)^(# template: \S+) [0-9a-f]+$", r"\1", facts) + code


@lru_cache
def functions(name):
    """A rendered kernel cut before each function, and before its first one."""
    return re.split(r"(?m)^(?=@(?:triton|gluon)\.jit)", rendered(name))


def shown(name):
    """What its file holds: all but functions that the plainest kernel of its family has too."""
    plain = f"{name.split('_')[0]}_noop"
    known = functions(plain)[1:] if plain in GOLDENS and plain != name else ()
    return "".join(each for each in functions(name) if each not in known)


@pytest.mark.parametrize("name", GOLDENS)
def test_rendered_kernel(name, request):
    file = FILES / f"{name}.py.txt"
    text = shown(name)
    if request.config.getoption("--accept-golden"):
        file.write_text(text)
    accepted = file.read_text() if file.exists() else ""
    difference = difflib.unified_diff(
        accepted.splitlines(), text.splitlines(), f"accepted {file.name}", "rendered", lineterm=""
    )
    told = "\n".join(difference)
    assert not told, f"{told}\n\nRead it; if it is right, accept it with `make golden`."


def test_every_golden_has_a_case():
    assert {file.name.removesuffix(".py.txt") for file in FILES.iterdir()} == set(GOLDENS)


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_code_that_people_can_read(name):
    text = rendered(name)
    compile(text, name, "exec")
    assert max(map(len, text.splitlines())) <= 200
    assert not any(line != line.rstrip() for line in text.splitlines())
