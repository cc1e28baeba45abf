"""Decode of many query heads a KV head for an H200 without one: no product waits, no spills."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.kernels.paged_decode.limits import serving_reasons
from flexattn.kernels.paged_decode.source import render_serving, render_serving_combine
from flexattn.runtime.build import compile_source
from flexattn.runtime.kernel_store import binary_of
from flexattn.runtime.resources import resources, spills_too_much
from tests.compile.shares import share
from tests.compile.test_serving import DEVICE, form
from tests.problems import serving_candidates
from tests.serving import PAIR

pytestmark = pytest.mark.oldest
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
