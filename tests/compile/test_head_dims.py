"""Hopper's kernels of head dimensions multiply no padding, spill not, and wait for nothing.

Those are multiples of 8, up to 256 and above. Gluon's tensors are powers of two wide: what wgmma
multiplies is read in the PTX and the SASS.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, document, relative_bias, softcap
from flexattn.kernels.base.config import describe
from flexattn.kernels.choose.defaults import default, space
from flexattn.kernels.hopper.config import tiles_of
from flexattn.kernels.hopper.space import v_box
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.compile.product_loops import product_loops
from tests.compile.test_split_tiles import read_before_written
from tests.families import estimates, render
from tests.problems import H200, problem

pytestmark = pytest.mark.oldest

CAUSAL = {"mask_mod": causal, "runs": True}
PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\S+ \{([^}]*)\}, (\{|%rd)")
# Boxes of 16, with two tiles of rows in flight; values of more than 128 columns; a pair of which
# the last box is part full.
QUICK = [(160, 160, "bfloat16", CAUSAL), (200, 72, "bfloat16", {})]
DIMS = (40, 48, 56, 72, 80, 88, 104, 112, 136, 160, 176, 192, 208, 224, 240)
PAIRS = (*((D, D) for D in DIMS), (192, 120), (64, 112), (80, 128), (128, 40))
REST = [
    (*pair, dtype, mods)
    for pair in PAIRS
    for dtype, mods in (("bfloat16", {}), ("float16", CAUSAL), ("float16", {}))
    if mods or dtype == "bfloat16" or pair == (80, 80)
]


def faults(wanted, config, tmp_path):
    """What is wrong with a config's kernel: a line, empty where it is as it should be."""
    compiled = compile_source(render(wanted.structure, config, H200, "test"), H200)
    taken = resources(compiled, H200)
    tiles = tiles_of(wanted.structure, config)
    products = PRODUCT.findall(compiled.asm["ptx"])
    shapes = [int(columns) for columns, *_ in products]
    # As often as each other, scores take a product for 16 columns, and values for 16 keys.
    steps = -(-wanted.structure.head_dim_qk // 16)
    values = shapes.count(tiles.v_columns)
    if not config.q_in_regs:  # both may be as wide
        values = sum(operand == "{" for _, _, operand in products)
    scores = len(products) - values
    found = {
        "spills": taken.starved,
        "wgmma waits": taken.serialised,
        "columns": set(shapes) != {config.BLOCK_N, tiles.v_columns},
        "accumulators": any(sums.count("%") * 2 != int(n) for n, sums, _ in products),
        "steps": scores * (config.BLOCK_N // 16) != values * steps,
        "shared memory": taken.shared > estimates(config, wanted.structure, H200)[0],
        "descriptors": read_before_written(compiled.asm["cubin"], tmp_path),
    }
    names = [name for name, is_so in found.items() if is_so]
    return f"{describe(config)}: {', '.join(names)}: {taken} {shapes}" if names else ""


@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), QUICK)
def test_no_padding_is_multiplied_and_nothing_spills(D, Dv, dtype, mods, tmp_path):
    wanted = problem(D=D, Dv=Dv, dtype=dtype, **mods)
    assert not (fault := faults(wanted, default(wanted, H200, "gluon"), tmp_path)), fault


@pytest.mark.full_matrix
@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), REST)
def test_every_head_dimension(D, Dv, dtype, mods, tmp_path):
    wanted = problem(D=D, Dv=Dv, dtype=dtype, **mods)
    assert not (fault := faults(wanted, default(wanted, H200, "gluon"), tmp_path)), fault


@pytest.mark.full_matrix
@pytest.mark.parametrize("D", [72, 96, 160, 224])
def test_boxes_that_a_search_tries(D, tmp_path):
    """Of its configs each sixth: a search drops what its compiler finds to spill."""
    wanted = problem(D=D, **CAUSAL)
    found = {
        replace(each, order="last", l2_swizzle=8)
        for each in space(wanted, H200)
        if getattr(each, "v_box", 0)
    }
    assert {each.v_box for each in found} == {v_box(wanted.structure)}
    some = sorted(found, key=describe)[::6]
    wrong = list(filter(None, (faults(wanted, config, tmp_path) for config in some)))
    assert not wrong, "\n".join(wrong)


DOCUMENTS = and_masks(document(torch.zeros(8192).int()), causal)
WIDE = [
    (512, 512, "bfloat16", {}),
    (512, 512, "float16", CAUSAL),
    (512, 512, "bfloat16", {"score_mod": softcap(50.0), **CAUSAL}),
]
WIDE_REST = [
    (512, 512, "bfloat16", {"mask_mod": causal}),
    (512, 512, "bfloat16", {"mask_mod": DOCUMENTS, "runs": True}),
    (512, 512, "bfloat16", {"score_mod": alibi(32, "cpu"), **CAUSAL}),
    (512, 512, "bfloat16", {"score_mod": relative_bias(torch.zeros(32, 64), 32)}),
    *(
        (*pair, "bfloat16", CAUSAL)
        for pair in ((320, 320), (448, 384), (512, 256), (384, 128), (576, 512))
    ),
]


def check(D, Dv, dtype, mods):
    wanted = problem(D=D, Dv=Dv, dtype=dtype, **mods)
    config = default(wanted, H200, "gluon")
    compiled = compile_source(render(wanted.structure, config, H200, "test"), H200)
    taken, tiles = resources(compiled, H200), tiles_of(wanted.structure, config)
    shapes = [int(columns) for columns, *_ in PRODUCT.findall(compiled.asm["ptx"])]
    assert set(shapes) == {config.BLOCK_N, tiles.v_columns}
    assert shapes.count(config.BLOCK_N) == 2 * D // 16
    assert not taken.serialised
    assert taken.shared <= estimates(config, wanted.structure, H200)[0]
    loops = product_loops(compiled.asm["cubin"])
    assert loops and not any(spills for _, spills in loops), (loops, taken)


@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), WIDE)
def test_no_loop_spills(D, Dv, dtype, mods):
    check(D, Dv, dtype, mods)


@pytest.mark.full_matrix
@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), WIDE_REST)
def test_what_else_is_served(D, Dv, dtype, mods):
    check(D, Dv, dtype, mods)
