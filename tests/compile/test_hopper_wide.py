"""Hopper's kernels of head dimensions above 256: their loops do not spill, nor wait in between."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import alibi, causal, document, relative_bias, softcap
from flexattn.kernels.choose.defaults import default
from flexattn.kernels.hopper.config import tiles_of
from flexattn.runtime.build import compile_source
from flexattn.runtime.resources import resources
from tests.compile.product_loops import product_loops
from tests.compile.test_head_dims import PRODUCT
from tests.families import estimates, render
from tests.problems import H200, problem

pytestmark = pytest.mark.oldest

CAUSAL = {"mask_mod": causal, "runs": True}
DOCUMENTS = and_masks(document(torch.zeros(8192).int()), causal)
QUICK = [
    (512, 512, "bfloat16", {}),
    (512, 512, "float16", CAUSAL),
    (512, 512, "bfloat16", {"score_mod": softcap(50.0), **CAUSAL}),
]
REST = [
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


@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), QUICK)
def test_no_loop_spills(D, Dv, dtype, mods):
    check(D, Dv, dtype, mods)


@pytest.mark.full_matrix
@pytest.mark.parametrize(("D", "Dv", "dtype", "mods"), REST)
def test_what_else_is_served(D, Dv, dtype, mods):
    check(D, Dv, dtype, mods)
