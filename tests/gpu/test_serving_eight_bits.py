"""Caches of 8 bits where each warp walks alone, on a GPU: each form that a tuner may choose."""

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.serving import DecodePlan, ServingConfig
from tests.serving import EIGHT_BITS, assert_right, batch, plan_for, quantized, run, with_rows

pytestmark = pytest.mark.usefixtures("poisoned")
CONFIGS = {
    "4 warps of 32 keys": ServingConfig(8, 128, 4, 1, 2, 1, "await", "heads"),
    "three a multiprocessor": ServingConfig(8, 64, 4, 1, 3, 1, "await", "heads"),
    "2 warps": ServingConfig(8, 64, 2, 1, 4, 1, "await", "heads"),
    "8 warps": ServingConfig(8, 256, 8, 1, 1, 1, "await", "heads"),
    "round": ServingConfig(8, 256, 8, 1, 1, 1, "await", "round"),
}
LENGTHS = [2047, 0, 1, 517, 9001, 33, 128]


def check(config, dtype, D=128, Dv=None, page=16, q_len=1, **mods):
    going_round = config.split_policy == "round"
    lengths = [30_011] if going_round else with_rows(LENGTHS, q_len)
    each = batch(
        [q_len] * len(lengths), lengths, 32, 8, D, Dv, dtype=torch.bfloat16, device="cuda"
    )
    few, wide, k_scale, v_scale = quantized(each, dtype, True)
    about = {"page": page, "config": config, "scaled": True, "kv_dtype": dtype, **mods}
    if going_round:
        about["page_size"] = about.pop("page")
        plan = DecodePlan(
            batch=1, kv_len=32_768, heads=(32, 8), head_dim=(D, Dv or D), lse=True, **about
        )
    else:
        plan = plan_for(few, **about)
    for _ in range(3):
        got = run(plan, few, k_scale=k_scale, v_scale=v_scale)
        assert_right(got, few, exact=wide, **mods)
    torch.cuda.synchronize()
    assert bool((plan._workspace.view(torch.int32) == -1).all())


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_forms(name, dtype):
    check(CONFIGS[name], dtype)


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("page", [0, 3, 64])
def test_head_dimensions_and_pages(page, D, Dv):
    check(CONFIGS["4 warps of 32 keys"], EIGHT_BITS[0], D, Dv, page)


@pytest.mark.parametrize("name", ["softcap", "causal", "window"])
def test_mods(name):
    mods = {
        "softcap": {"score_mod": softcap(30.0)},
        "causal": {"mask_mod": causal},
        "window": {"mask_mod": sliding_window(300)},
    }[name]
    check(CONFIGS["4 warps of 32 keys"], EIGHT_BITS[0], q_len=2, **mods)
