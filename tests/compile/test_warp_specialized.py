"""Decodes that one warp loads for, for an H200 without one: MLA's and of many query heads.

Products overlap, and nothing spills in the loop over tiles.
"""

import re
from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.engines import SEEN_KEYS
from flexattn.kernels.paged_decode.family import mla_space
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import resources, spills_too_much
from tests.compile.shares import share
from tests.compile.test_serving import DEVICE, form
from tests.odd_mods import checkerboard
from tests.problems import serving_candidates
from tests.serving import PAIR

pytestmark = pytest.mark.oldest
DEFAULT, FEW_DEFAULT = next(mla_space()), next(mla_space(16))
MLA = {
    "128 heads": {"heads": (128, 1)},
    "drafts": {"heads": (16, 1), "q_len": 4, "mask": causal, "lse": True},
    "window": {"heads": (16, 1), "mask": sliding_window(1024), "score": softcap(30.0)},
    "pages of 16": {"heads": (16, 1), "page": 16},
    "a mask in every tile": {"heads": (16, 1), "q_len": 4, "mask": checkerboard(3)},
}


@pytest.mark.parametrize("name", share(MLA, lambda name: name == "128 heads"))
def test_mla(name):
    """Products go on beside each other, and none waits for a register in the loop over tiles."""
    wanted = form(**{"D": (576, 512), "page": 64, "shared_kv": True, **MLA[name]})
    assert not serving_reasons(DEFAULT, wanted, DEVICE)
    source = render_serving(wanted, DEFAULT, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    taken = resources(compiled, DEVICE)
    # Of each warpgroup 36 of scores, and four for each of two products with values.
    assert taken.matrix_instructions == 88 and not taken.serialised
    assert taken.register_split[1] == 232 and taken.registers == 168
    assert taken.shared <= DEVICE.shared_memory
    assert not spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack)
    assert binary_of(compiled, "sm_90").maps[0].block == (1, 1, min(64, wanted.page), 64)
    combine = render_serving_combine(wanted, DEFAULT, DEVICE)
    assert resources(compile_source(combine, DEVICE), DEVICE).spills == 0
    # It waits for a launch that lets it begin.
    assert combine.launch_pdl and "griddepcontrol.launch_dependents" in source.text


CHOSEN = {
    "tokens": {"heads": (128, 1)},
    "of eight bits": {"heads": (16, 1), "kv": torch.float8_e4m3fn, "scaled": True},
    "units under a mask": {"q_len": 4, "selection": (64, 32), "mask": sliding_window(1024)},
    "without pages": {"page": 0, "score": softcap(30.0), "lse": True},
    "most that there may be": {"heads": (128, 1), "selection": (4096, 1), "kv": torch.float8_e5m2},
}


@pytest.mark.parametrize("name", share(CHOSEN, lambda name: name == "of eight bits"))
def test_chosen_keys(name):
    """Gathered by four warps, 16 bytes a thread; nothing spills much."""
    about = {"D": (576, 512), "page": 64, "shared_kv": True, "selection": (2048, 1)}
    wanted = form(**{**about, "heads": (16, 1), **CHOSEN[name]})
    config = next(serving_candidates(wanted, DEVICE))
    few = wanted.rows <= 16
    assert config == (FEW_DEFAULT if few else DEFAULT)
    source = render_serving(wanted, config, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    taken, ptx = resources(compiled, DEVICE), compiled.asm["ptx"]
    assert taken.matrix_instructions == (68 if few else 88) and not taken.serialised
    assert taken.register_split[1] == (184 if few else 192)
    # Bits of single keys are in memory that Triton knows nothing of. Behind it begins Triton's,
    # whose tiles lie at multiples of 1,024 bytes.
    own = sum(map(int, re.findall(r"\.b8 seen\[(\d+)\]", ptx)))
    assert own == (SEEN_KEYS // 8 if config.sifts(wanted) else 0) and own % 1024 == 0
    assert taken.shared + own <= DEVICE.shared_memory
    assert not spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack)
    # Of a tile 9 columns of 64 keys, or of two halves of 64 keys each.
    if wanted.kv_dtype == "bfloat16":
        assert len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)) == (36 if few else 72)
    else:
        assert len(re.findall(r"ld\.global\.v4", ptx)) >= (36 if few else 44)
    merge = compile_source(render_serving_combine(wanted, config, DEVICE), DEVICE)
    assert resources(merge, DEVICE).spills == 0


FEW = {
    "16 rows": (16, 3, {"heads": (16, 1)}),
    "one request": (16, 2, {"heads": (16, 1), "B": 1, "page": 16}),
    "window": (16, 3, {"heads": (12, 1), "mask": sliding_window(1024), "score": softcap(30.0)}),
    "drafts": (32, 2, {"heads": (16, 1), "q_len": 2, "mask": causal, "lse": True}),
}


@pytest.mark.parametrize("name", share(FEW, lambda name: name == "16 rows"))
def test_few_rows(name):
    """With operands swapped: the same, and the combine kernel has room to begin beside it."""
    rows, stages, about = FEW[name]
    wanted = form(**{"D": (576, 512), "page": 64, "shared_kv": True, **about})
    config = replace(DEFAULT, BLOCK_M=rows, BLOCK_N=64, num_stages=stages)
    assert not serving_reasons(config, wanted, DEVICE)
    compiled = compile_source(render_serving(wanted, config, DEVICE, name), DEVICE)
    taken = resources(compiled, DEVICE)
    # 36 of scores, 32 of outputs: 64 columns by 16 keys each.
    assert taken.matrix_instructions == 68 and not taken.serialised
    assert taken.shared <= DEVICE.shared_memory
    assert not spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack)
    # Of an address that both products had ptxas of Triton 3.6 read one before it was written.
    products = re.findall(
        r"wgmma.mma_async.*}, (%rd\d+), (%rd\d+), .*, ([01]);", compiled.asm["ptx"]
    )
    assert len(products) == 68
    scores, values = ({x for *pair, by in products if by == b for x in pair} for b in "01")
    assert not scores & values
    source = render_serving_combine(wanted, config, DEVICE)
    combine = resources(compile_source(source, DEVICE), DEVICE)
    assert combine.spills == 0 and source.launch_pdl
    # Eight warps, and four.
    assert 256 * taken.registers + 128 * combine.registers <= DEVICE.registers


ONE = replace(PAIR, num_warps=4)


def ancestors(past, tree):
    """A tree of drafts behind the keys before them, by a table."""

    def mask(b, h, q_idx, kv_idx):
        own = kv_idx - past[b]
        return (own < 0) | tree[b, q_idx - past[b], own]

    return mask


TREE = ancestors(torch.zeros(16, dtype=torch.int32), torch.zeros(16, 8, 8, dtype=torch.bool))
# None stands for the default.
CASES = {
    "default": (None, {}),
    "default, 128 rows": (None, {"heads": (128, 1)}),
    "default, 71 rows of 64 columns": (None, {"heads": (71, 1), "D": (64, 64), "B": 64}),
    "default, contiguous": (None, {"page": 0, "lse": True}),
    "default, 512 requests": (None, {"B": 512, "mask": causal, "sinks": True}),
    "default, tree": (None, {"heads": (64, 8), "q_len": 8, "mask": TREE, "score": softcap(30.0)}),
    "48 heads": (PAIR, {}),
    "six slots": (replace(PAIR, num_stages=6), {"page": 64}),
    "one warpgroup": (ONE, {"lse": True}),
    "two programs an SM": (replace(ONE, num_stages=2, per_sm=2), {"page": 0}),
    "window": (PAIR, {"mask": sliding_window(1024), "score": softcap(30.0), "sinks": True}),
    "drafts": (PAIR, {"heads": (64, 8), "q_len": 4, "mask": causal, "lse": True}),
    "mixed": (PAIR, {"total_q": 2048, "mask": causal}),
    "64 columns": (PAIR, {"D": (64, 64)}),
    "256 columns": (replace(PAIR, num_stages=2), {"D": (256, 256), "mask": causal}),
    "256 columns, one warpgroup": (replace(ONE, num_stages=3), {"D": (256, 256)}),
}


@pytest.mark.parametrize("name", share(CASES, lambda name: name in ("default", "48 heads")))
def test_template(name):
    config, about = CASES[name]
    wanted = form(**{"heads": (48, 1), "B": 16, **about})
    if config is None:
        config = next(serving_candidates(wanted, DEVICE))
        assert config.warp_specialized
    assert not serving_reasons(config, wanted, DEVICE)
    source = render_serving(wanted, config, DEVICE, name)
    compiled = compile_source(source, DEVICE)
    taken = resources(compiled, DEVICE)
    groups, D = config.num_warps // 4, wanted.head_dim_v
    # Of a warpgroup a product of scores for every 16 columns, and four with values.
    assert taken.matrix_instructions == groups * (D // 16 + 4) and not taken.serialised
    assert not spills_too_much(taken.loop_spills, taken.loop_instructions, taken.stack)
    assert taken.shared <= DEVICE.shared_memory
    box = (1, 1, min(64, wanted.page or 64), 64)
    assert [each.block for each in binary_of(compiled, "sm_90").maps] == [box, box]
    assert "griddepcontrol.launch_dependents" in source.text
    combine = render_serving_combine(wanted, config, DEVICE)
    merging = resources(compile_source(combine, DEVICE), DEVICE)
    assert combine.launch_pdl
    assert not spills_too_much(merging.loop_spills, merging.loop_instructions, merging.stack)
    if D <= 128 and config.per_sm == 1:
        # It has room to begin beside: 4 warps for each warpgroup and for the one that loads.
        held = 128 * (groups + 1) * taken.registers
        assert held + 128 * merging.registers <= DEVICE.registers


@pytest.mark.parametrize("name", share(["tall", "16 rows"], lambda name: name == "tall"))
def test_dependent_launches(name):
    """The kernel that merges begins while the Triton template's runs, and is cut for all SMs."""
    height, heads = (64, (48, 1)) if name == "tall" else (16, (128, 8))
    wanted = form(heads=heads, B=16)
    config = ServingConfig(height, 64, 4, 3, 2, combine="dependent")
    assert not serving_reasons(config, wanted, DEVICE)
    source = render_serving(wanted, config, DEVICE, name)
    combine = render_serving_combine(wanted, config, DEVICE)
    assert "griddepcontrol.launch_dependents" in compile_source(source, DEVICE).asm["ptx"]
    assert combine.launch_pdl and resources(compile_source(combine, DEVICE), DEVICE).spills == 0
    launched = replace(config, combine="launch")
    assert "griddepcontrol" not in render_serving(wanted, launched, DEVICE, name).text
    assert not render_serving_combine(wanted, launched, DEVICE).launch_pdl
