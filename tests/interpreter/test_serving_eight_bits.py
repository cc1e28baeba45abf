"""Caches of 8 bits where each warp walks alone, interpreted: dtypes, pages, head dimensions."""

import pytest
import torch

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.kernels.paged_decode.config import ServingConfig
from flexattn.serving import DecodePlan
from tests.covering import each_choice, pairwise
from tests.serving import EIGHT_BITS, assert_right, batch, plan_for, quantized, run, with_rows

HEADS = ServingConfig(8, 32, 2, 1, combine="await", split_policy="heads")
ROUND = ServingConfig(8, 32, 2, 1, combine="await", split_policy="round")
LENGTHS = [53, 0, 1, 17, 128, 32]
E4M3 = torch.float8_e4m3fn


def check(each, dtype, *, config=HEADS, page=16, per_head=False, layout="NHD", **mods):
    few, wide, k_scale, v_scale = quantized(each, dtype, per_head)
    plan = plan_for(
        few, page=page, config=config, scaled=True, kv_dtype=dtype, layout=layout, **mods
    )
    got = run(plan, few, layout=layout, k_scale=k_scale, v_scale=v_scale)
    assert_right(got, few, exact=wide, **mods)


def requests(D=64, Dv=None, dtype=torch.bfloat16, lengths=LENGTHS, q_len=1):
    lengths = with_rows(lengths, q_len)
    return batch([q_len] * len(lengths), lengths, 8, 2, D, Dv, dtype=dtype)


@pytest.mark.oldest
@pairwise(
    wide=[torch.float16, torch.bfloat16], dtype=EIGHT_BITS,
    per_head=[pytest.param(False, id="per_tensor"), pytest.param(True, id="per_head")],
)  # fmt: skip
def test_dtypes_and_scales(wide, dtype, per_head):
    check(requests(dtype=wide), dtype, per_head=per_head)


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (64, 128), (128, 64)])
def test_head_dimensions(D, Dv):
    check(requests(D, Dv), E4M3, score_mod=softcap(30.0))


@each_choice(page=[0, 3, 8, 64], layout=["NHD", "HND"])
def test_caches(page, layout):
    check(requests(), E4M3, page=page, layout=layout)


@pytest.mark.parametrize("mask", [causal, sliding_window(9)], ids=["causal", "window"])
def test_masks(mask):
    check(requests(q_len=2), E4M3, mask_mod=mask)


@pytest.mark.parametrize(("warps", "own"), [(1, 64), (4, 16)])
def test_pieces(warps, own):
    config = ServingConfig(8, warps * own, warps, 1, 5, 1, "await", "heads")
    check(requests(lengths=[53, 0, 1, 170, 128, 96]), E4M3, config=config)


@pytest.mark.parametrize("keys", [0, 33, 517])
def test_tiles_of_one_request_go_round(keys):
    few, wide, k_scale, v_scale = quantized(requests(lengths=[keys]), E4M3, False)
    plan = DecodePlan(
        batch=1, kv_len=600, heads=(8, 2), head_dim=64, device="cpu", page_size=16, lse=True,
        config=ROUND, kv_dtype=E4M3, scaled=True,
    )  # fmt: skip
    got = run(plan, few, k_scale=k_scale, v_scale=v_scale)
    assert_right(got, few, exact=wide)
