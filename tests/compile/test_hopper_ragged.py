"""Hopper's kernels of plans and of packed sequences: their loops do not spill."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.kernels.hopper.config import RaggedPrefillConfig
from flexattn.kernels.hopper.ragged import (
    ragged_defaults,
    render_merge_parts,
    render_row_tiles,
)
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.compile.product_loops import product_loops
from tests.families import estimates, render, violated
from tests.problems import H200, plan_of

CONFIG = RaggedPrefillConfig(
    2, 128, 2, 232, ping_pong=True, tile_scheduler="dynamic", order="sections",
    lazy_rescale=True, cross_tile_pipeline=False, v_box=64,
)  # fmt: skip
GATHERING = replace(CONFIG, consumer_regs=224)
WINDOW = {"score": alibi(32, "cpu"), "mask": sliding_window(1000)}
CAPPED = {"score": softcap(30.0), "mask": sliding_window(1000)}
GAP = {"mask": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 1024))}
E4M3 = {"kv": torch.float8_e4m3fn, "scaled": True}
E5M2 = {"kv": torch.float8_e5m2}
CASES = {
    "pages of 16": (128, 16, CONFIG, {}),
    "pages of 128": (128, 128, CONFIG, {}),
    "single keys": (128, 1, replace(GATHERING, packed_heads=4, splits=True), {}),
    "single keys, capped": (128, 1, replace(GATHERING, ping_pong_softmax=True), CAPPED),
    "single keys of 64 columns": (64, 1, GATHERING, {}),
    "single keys of 256 columns": (256, 1, replace(GATHERING, BLOCK_N=64), {"lse": True}),
    "pages of 24 keys of 80 columns": (80, 24, replace(GATHERING, packed_heads=4), {}),
    "packed": (128, 16, replace(CONFIG, pack_gqa=True), {"lse": True}),
    "slices": (128, 16, replace(CONFIG, pack_gqa=True, splits=True), {"heads": (28, 4)}),
    "slices over single keys": (
        128,
        1,
        replace(GATHERING, pack_gqa=True, splits=True),
        {"heads": (40, 8)},
    ),
    "a gap": (128, 16, replace(CONFIG, packed_heads=4, splits=True), GAP),
    "heads in rows": (128, 16, replace(CONFIG, packed_heads=4, splits=True), {"lse": True}),
    "rows of no head": (
        128,
        128,
        replace(CONFIG, packed_heads=8, splits=True),
        {**CAPPED, "sinks": True},
    ),
    "window": (128, 64, replace(CONFIG, pack_gqa=True, splits=True), WINDOW),
    "64 columns": (64, 16, replace(CONFIG, splits=True), {"sinks": True}),
    "256 columns": (256, 16, replace(CONFIG, BLOCK_N=64, packed_heads=2, splits=True), {}),
    "eight bits": (128, 16, replace(CONFIG, packed_heads=4, splits=True), E4M3),
    "eight bits, capped": (128, 128, replace(CONFIG, packed_heads=8), {**E4M3, **CAPPED}),
    "eight bits of 64 columns": (64, 16, replace(CONFIG, splits=True), E5M2),
    "eight bits of 256 columns": (256, 16, replace(CONFIG, BLOCK_N=64, packed_heads=2), E5M2),
    # Pages of 0 keys: packed sequences.
    "packed sequences": (128, 0, replace(CONFIG, packed_heads=4), {"lse": True}),
    "capped sequences": (
        128,
        0,
        replace(CONFIG, packed_heads=8),
        {**CAPPED, "sinks": True, "lse": True},
    ),
    "sequences of 64 columns": (
        64,
        0,
        replace(CONFIG, consumers=3, num_stages=3, consumer_regs=160, packed_heads=8),
        {"lse": True},
    ),
    "sequences of 96 columns": (96, 0, CONFIG, {"lse": True}),
    "sequences of 256 columns": (256, 0, replace(CONFIG, BLOCK_N=64), {"lse": True}),
}


@pytest.mark.parametrize("requests", [1, 4])
def test_a_capped_score_spills_in_no_loop_of_products(requests):
    """By static defaults, beside a causal mask; with splits, of several requests."""
    asked = plan_of(requests, total_q=2048, score=CAPPED["score"], mask=causal)
    config = next(ragged_defaults(asked, H200))
    assert config.ping_pong_softmax and config.splits == (requests > 1)
    assert not violated(config, asked.structure, H200)
    compiled = compile_source(render(asked.structure, config, H200, "test"), H200)
    assert not resources(compiled, H200).serialised
    loops = product_loops(compiled.asm["cubin"])
    assert loops and not any(spills for _, spills in loops)


@pytest.mark.parametrize("case", CASES)
def test_no_loop_spills(case):
    D, page, config, asked = CASES[case]
    form = plan_of(4, total_q=2048, D=D, page=page, **{"mask": causal, **asked}).structure
    form = replace(form, ragged_kv=not page)
    assert not violated(config, form, H200)
    compiled = compile_source(render(form, config, H200, "test"), H200)
    if config.splits:
        compile_source(render_merge_parts(form, config, H200), H200)
    taken = resources(compiled, H200)
    assert not taken.serialised
    assert taken.shared <= estimates(config, form, H200)[0]
    loops = product_loops(compiled.asm["cubin"])
    if "kv" in asked:
        widening = product_loops(compiled.asm["cubin"], "UNPACK_B")
        assert widening
        loops += widening
    if page in (1, 24):
        # Each of four warps issues less during a tile's products, which take 2,700 clocks.
        ((copying, spills),) = product_loops(compiled.asm["cubin"], "LDGSTS")
        assert copying < 450 and not spills
        assert "cp.async.ca" not in compiled.asm["ptx"]
    assert loops and not any(spills for _, spills in loops), (loops, taken)


def test_each_kernel_waits_for_the_one_before():
    """Launched early, they read nothing of each other's before that kernel has ended."""
    D, page, config, _ = CASES["64 columns"]
    form = plan_of(4, total_q=2048, D=D, page=page, mask=causal).structure
    sources = (
        render_row_tiles(form, config, H200),
        render(form, config, H200, "test"),
        render_merge_parts(form, config, H200),
    )
    assert [each.launch_pdl for each in sources] == [False, True, True]
    for i, source in enumerate(sources):
        ptx = compile_source(source, H200).asm["ptx"]
        first_load = ptx.index("ld.global")
        assert ("griddepcontrol.wait" in ptx[:first_load]) == (i > 0)
        assert ("griddepcontrol.launch_dependents" in ptx) == (i < 2)
