"""What torch rounds to 16 bits between two operations, a compiled kernel rounds too.

Four of 500 random mods were wrong on an H200: `bias * 0.27 + 1.0` of a bfloat16 table had become
one fused multiply-add in bfloat16, which rounds once where torch rounds twice.
"""

import re

import pytest
import torch

from flexattn.device import named
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.mods import bind
from flexattn.runtime.build import compile_source
from tests.families import render
from tests.problems import problem

HALF_FMA = re.compile(r"\bfma\.rn\.b?f16|v_(?:pk_)?fma_f16")
HOPPER, TRITON = HopperPrefillConfig(2, 64, 1, 240), PrefillConfig(64, 64, 4, 1)


def added(table):
    return lambda score, b, h, q_idx, kv_idx: score * (table[kv_idx] * 0.27 + 1.0)


def subtracted(table):
    return lambda score, b, h, q_idx, kv_idx: score * (2.0 - -(table[q_idx] * table[kv_idx]))


@pytest.mark.oldest
@pytest.mark.parametrize("make", [added, subtracted])
@pytest.mark.parametrize(
    ("config", "device", "dtype"),
    [
        (HOPPER, "nvidia-h200", torch.bfloat16),
        (TRITON, "nvidia-h200", torch.float16),
        (TRITON, "amd-mi300x", torch.float16),
    ],
)
def test_no_product_is_fused_with_its_sum(make, config, device, dtype):
    score = bind(make(torch.zeros(300, dtype=dtype)), "score")
    wanted, on = problem("prefill", 64, score_mod=score), named(device)
    source = render(wanted.structure, config, on, "test")
    assembly = compile_source(source, on).asm
    text = assembly["ptx"] if "ptx" in assembly else assembly["amdgcn"]
    assert HALF_FMA.findall(text) == []
