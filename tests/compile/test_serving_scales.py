"""Kernels of caches with fine scales, and the one that stores keys, compiled without a GPU."""

import re

import pytest
import torch

from flexattn.catalogue import causal
from flexattn.device import named
from flexattn.kernels.cache_append.quantize import render_quantize
from flexattn.kernels.cache_append.source import render_append
from flexattn.kernels.paged_decode.source import render_serving
from flexattn.problem.serving import AppendForm, RopeForm
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import resources
from tests.compile.shares import share
from tests.compile.test_serving import DEVICE, form, spills_by_tile
from tests.problems import serving_candidates

pytestmark = pytest.mark.oldest
E4M3 = torch.float8_e4m3fn
FORMS = {
    "token_head": {"scales": "token_head"},
    "contiguous": {"scales": "token", "page": 0},
    "one page a tile": {"scales": "page_head", "page": 64},
    "one request": {"scales": "token_head", "B": 1},
    "several queries": {"scales": "token_head", "q_len": 4, "mask": causal},
    "invariant": {"scales": "token_head", "batch_invariant": True},
}


@pytest.mark.parametrize("name", share(FORMS, lambda name: name == "token_head"))
def test_scales_cost_the_loop_over_tiles_no_spill(name):
    """In a tile that warps share they are copied ahead like K and V."""
    wanted = form(kv=E4M3, **FORMS[name])
    config = next(serving_candidates(wanted, DEVICE))
    source = render_serving(wanted, config, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    assert spills_by_tile(compiled) == 0
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2
    assert config.warp_private == (name != "several queries")
    copies = compiled.asm["ttgir"].count("async_copy_global_to_local")
    assert copies == (0 if config.warp_private else 4 * config.num_stages)
    assert "fma.rn.f32" not in compiled.asm["ptx"] or name != "invariant"


def test_scales_on_amd():
    device = named("amd-mi300x")
    wanted = form(kv=E4M3, scales="token_head")
    source = render_serving(wanted, next(serving_candidates(wanted, device)), device, "test")
    assert "v_mfma" in compile_source(source, device).asm["amdgcn"]


APPENDS = {
    "plain": AppendForm("bfloat16", "bfloat16", 128, 128, 8, 16, "int64"),
    "tensor": AppendForm("bfloat16", "float8_e4m3fn", 128, 128, 8, 16, "int64", "tensor"),
    "rope": AppendForm(
        "float16", "float8_e5m2", 128, 64, 8, 16, "int32", "token_head", RopeForm(64, False, "")
    ),
    "chunks": AppendForm(
        "bfloat16", "float8_e4m3fn", 128, 128, 128, 16, "ragged table", "token",
        RopeForm(128, True, "float32"),
    ),
    "odd": AppendForm(
        "bfloat16", "float8_e4m3fn", 72, 40, 3, 3, "int64", "page_head", None, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", share(APPENDS, lambda name: name == "tensor"))
def test_new_keys_are_read_and_stored_in_vectors(name):
    """16 bytes at once are read, and as many numbers stored; a pair is rounded at once."""
    wanted = APPENDS[name]
    source = render_append(wanted, DEVICE)
    compiled = compile_source(source, DEVICE)
    ptx = compiled.asm["ptx"]
    taken = resources(compiled, DEVICE)
    # Triton 3.6 reduces large angles by a table of 32 bytes in local memory.
    assert taken.spills == 0 or (name == "rope" and taken.stack == 32)
    assert binary_of(compiled, "sm_90").parameters == len(source.arguments) + 2
    assert ("satfinite" in ptx) == (name != "plain")
    if wanted.aligned:
        assert re.search(r"ld\.global[\w.:]*\.v4\.b32", ptx)
        assert re.search(
            rf"st\.global[\w.:]*\.v{4 if name in ('plain', 'chunks') else 2}\.b32", ptx
        )
        assert not re.search(r"st\.global[\w.:]*\.b(8|16)\b", ptx)


@pytest.mark.parametrize(("heads", "D", "rounds"), [(1, 2, False), (2, 2, True)])
def test_a_token_of_fewer_numbers_than_are_rounded_at_a_time(heads, D, rounds):
    small = AppendForm("bfloat16", "float8_e4m3fn", D, D, heads, 16, "int64", "token", None, False)
    compiled = compile_source(render_append(small, DEVICE), DEVICE)
    assert ("satfinite" in compiled.asm["ptx"]) == rounds


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-a100"])
def test_whole_tensors_are_read_and_stored_in_vectors(name):
    device = named(name)
    compiled = compile_source(
        render_quantize("bfloat16", 128, 64, True, True, True, device), device
    )
    ptx = compiled.asm["ptx"]
    assert resources(compiled, device).spills == 0
    assert ("satfinite" in ptx) == (name == "nvidia-h200")
    assert re.search(r"ld\.global[\w.:]*\.v4\.b32", ptx)
    assert not re.search(r"st\.global[\w.:]*\.b(8|16)\b", ptx)


@pytest.mark.parametrize("arch", ["nvidia-a100", "amd-mi300x"])
@pytest.mark.parametrize("name", share(["tensor", "rope"], lambda name: name == "tensor"))
def test_where_no_instruction_rounds_to_eight_bits(name, arch):
    """Bytes are made of integers: sm_80's Triton knows no e4m3."""
    device = named(arch)
    compiled = compile_source(render_append(APPENDS[name], device), device)
    assert not re.search(r"satfinite|cvt_pk_(fp8|bf8)", compiled.asm.get("ptx", ""))
