"""Caches whose pages, tokens or heads have scales of their own, interpreted."""

import pytest
import torch

from flexattn.kernels.paged_decode.config import ServingConfig
from tests.serving import (
    EIGHT_BITS,
    assert_right,
    batch,
    finely_quantized,
    plan_for,
    run,
    scale_tensors,
)

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
TILE = ServingConfig(16, 16, 4, 2)
WARPS = ServingConfig(8, 32, 2, 1, combine="await", split_policy="heads")
WALKS = {"tile": TILE, "warp": WARPS}
LENGTHS = [53, 0, 1, 17, 128, 32]
SCALES = ["page", "page_head", "token", "token_head"]
E4M3 = EIGHT_BITS[0]


def check(each, scales, *, dtype=E4M3, config=TILE, page=16, layout="NHD", call=None, **mods):
    few, wide, steps = finely_quantized(each, dtype, scales, page)
    ragged = len(set(each.q_lens)) > 1
    options = {name: mods[name] for name in mods if name != "sinks"}
    plan = plan_for(
        few, page=page, config=config, scaled=scales, kv_dtype=dtype, layout=layout,
        ragged=ragged, sinks="sinks" in mods, **options,
    )  # fmt: skip
    given = scale_tensors(steps, plan, scales, layout)
    if "sinks" in mods:
        given["sinks"] = mods["sinks"]
    got = run(plan, few, layout=layout, **given)
    assert_right(got, few, exact=wide, **mods)


def requests(D=64, Dv=None, dtype=torch.bfloat16, lengths=LENGTHS, q_len=1):
    return batch([q_len] * len(lengths), lengths, 8, 2, D, Dv, dtype=dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("walk", WALKS)
def test_scales_of_pages_and_tokens(walk, scales, layout):
    check(requests(), scales, config=WALKS[walk], layout=layout)
