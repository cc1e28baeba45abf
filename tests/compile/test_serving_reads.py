"""Loads of serving kernels, and stores of new keys: lengths, scales, vectors.

A length is loaded once, by one thread of a program. Another stream may change lengths while a
launch reads them. Threads that load one length at two times then take different numbers of turns,
and what they exchange at barriers is garbage, an address among it.
"""

import math
import re

import pytest
import torch

from flexattn.catalogue import causal, sliding_window
from flexattn.device import named
from flexattn.kernels.cache_append.source import render_append, render_quantize
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.problem.serving import AppendForm, RopeForm
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import resources
from tests.compile.shares import share
from tests.compile.test_serving import DEVICE, form, spills_by_tile
from tests.problems import serving_candidates

pytestmark = pytest.mark.oldest
LENGTHS = ("SEQ_LENS", "CU_SEQLENS", "KV_START")
LAST, LAUNCH, DEPENDENT = (
    ServingConfig(16, 64, 4, 3, combine=combine) for combine in ("last", "launch", "dependent")
)
CHUNKS = ServingConfig(64, 64, 8, 2, combine="launch")
CASES = {
    "1": ({"B": 1}, LAST),
    "8": ({"B": 8, "mask": sliding_window(700)}, LAST),
    "64": ({"B": 64, "mask": sliding_window(700)}, LAST),
    "512": ({"B": 512}, LAST),
    "launch": ({"B": 64, "mask": sliding_window(700)}, LAUNCH),
    "launch 512": ({"B": 512}, LAUNCH),
    "dependent": ({"B": 8, "mask": sliding_window(700)}, DEPENDENT),
    "one chunk": ({"B": 1, "total_q": 1024, "mask": causal}, CHUNKS),
    "32, offset": ({"B": 32, "total_q": 64, "offset": True, "mask": causal}, LAST),
    "chunks": ({"B": 8, "total_q": 2048, "mask": causal}, LAUNCH),
    "eight warps": ({"B": 64, "total_q": 2048, "mask": causal, "lse": True}, CHUNKS),
    "offset": ({"B": 64, "offset": True, "mask": causal}, LAST),
    "prefix": ({"B": 64, "prefix": True, "lse": True}, LAUNCH),
}
MLA = ServingConfig(64, 128, 4, 1, 1, 1, "launch", "whole")
LATENT = {"D": (576, 512), "page": 64, "shared_kv": True, "heads": (16, 1)}


def loads_of(name, ttgir):
    """The types of all loads through the pointer argument of a name."""
    known, found = {name}, []
    for line in ttgir.splitlines():
        made = re.match(r"\s*%(\S+) = (\S+) %([\w#]+)", line)
        if made is None or made[3] not in known:
            continue
        if made[2] in ("tt.splat", "tt.addptr"):
            known.add(made[1])
        elif made[2] != "tt.ptr_to_int":  # of a prefetch
            assert made[2] in ("tt.load", "amdg.buffer_load"), line
            found.append(re.search(r".*(?::|->) (\S.*?)(?: loc\(|$)", line)[1])
    return found


def spread(layout, ttgir):
    """Elements of a thread, threads of a warp and warps, of each dimension of a layout."""
    about = re.search(rf"^#{layout} = #ttg\.blocked<{{(.*?)}}>", ttgir, re.MULTILINE)[1]
    names = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    found = (re.search(rf"{name} = \[([\d, ]+)\]", about)[1].split(", ") for name in names)
    return [[int(number) for number in each] for each in found]


def assert_no_copy(kind, ttgir, threads):
    """A vector of so many elements that each thread has its own."""
    size, layout = re.fullmatch(r"tensor<(\d+)x\S*i32>?, #(\w+)>", kind).groups()
    per_thread, lanes, warps = map(math.prod, spread(layout, ttgir))
    assert lanes * warps == threads
    assert per_thread * threads <= int(size), "no thread is left over for a copy"


def assert_within_warps(ttgir):
    """Sums and searches over requests exchange nothing between warps: a vector lies in one."""
    scalar = r"\(tensor<(\d+)xi32, (.*?)>\)? -> i32"
    scan = r'"tt\.scan".*?\n(?:.*\n)*?.*\(tensor<(\d+)xi32, (.*?)>\)'
    kinds = re.findall(scan, ttgir) + re.findall(scalar, ttgir)
    assert len(kinds) >= 4
    for size, layout in kinds:
        per_thread, lanes, _ = spread(re.search(r"#(\w+)\W*$", layout)[1], ttgir)
        # Of a slice along its parent's first dimension the second is left.
        assert int(size) <= per_thread[-1] * lanes[-1], (size, layout)


def check(source, device, threads, names, few):
    ttgir = compile_source(source, device).asm["ttgir"]
    if few:
        assert_within_warps(ttgir)
    for name in LENGTHS:
        found = loads_of(name, ttgir)
        # A request's rows begin at one number and end at the next.
        assert len(found) == {"CU_SEQLENS": 2}.get(name, 1) * (name in names), (name, found)
        for kind in found:
            assert_no_copy(kind, ttgir, threads)


@pytest.mark.releases
@pytest.mark.parametrize("name", share(CASES, lambda name: name in ("64", "chunks")))
def test_each_length_is_loaded_once(name):
    about, config = CASES[name]
    wanted = form(**about)
    names = {"SEQ_LENS"}
    if wanted.ragged:
        names.add("CU_SEQLENS")
    if wanted.offset:
        names.add("KV_START")
    few = wanted.requests <= 32
    check(render_serving(wanted, config, DEVICE, name), DEVICE, 32 * config.num_warps, names, few)
    if config.merges_apart:
        combine = render_serving_combine(wanted, config, DEVICE)
        check(combine, DEVICE, 128, names, few)


def test_the_kernel_that_merges_latent_keys():
    wanted = form(B=8, **LATENT)
    check(render_serving_combine(wanted, MLA, DEVICE), DEVICE, 128, {"SEQ_LENS"}, True)


def test_waves_of_64_threads():
    device = named("amd-mi300x")
    source = render_serving(form(), ServingConfig(16, 64, 4, 2), device, "test")
    check(source, device, 256, {"SEQ_LENS"}, True)


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
        render_quantize("bfloat16", 128, 64, True, True, True, True, device), device
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
