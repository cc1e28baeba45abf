"""Decode of many query heads a KV head on Hopper, on a GPU: tiles, splits and merges."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window, softcap
from flexattn.serving import ServingConfig
from tests.odd_mods import checkerboard
from tests.serving import (
    PAIR,
    assert_right,
    assert_right_of_shared_keys,
    batch,
    check,
    plan_for,
    run,
    with_rows,
)
from tests.support import ON_SM_90

pytestmark = [pytest.mark.usefixtures("poisoned"), ON_SM_90]
# Two warpgroups, and one.
ONE = replace(PAIR, num_warps=4)
DEFAULTS = replace(ONE, num_stages=3), replace(ONE, num_stages=2, per_sm=2)
TWO = replace(PAIR, num_stages=2)
LENGTHS = [2047, 0, 1, 517, 4096, 33, 128]
CASES = {
    "48 heads": {},
    "one warpgroup": {"config": ONE},
    "two programs an SM": {"config": replace(ONE, num_stages=2, per_sm=2)},
    "six slots": {"config": replace(PAIR, num_stages=6)},
    "pages of 64": {"page": 64},
    "pages of 256, HND": {"page": 256, "layout": "HND"},
    "contiguous": {"page": 0, "heads": (33, 1)},
    "float16": {"dtype": torch.float16, "sinks": True},
    "64 columns": {"D": 64, "heads": (71, 1)},
    "256 columns": {"D": 256, "config": TWO, "heads": (32, 2)},
    "256 columns, one warpgroup": {"D": 256, "config": replace(ONE, num_stages=3)},
    "drafts": {"heads": (64, 8), "q_len": 4, "mask_mod": causal},
    "128 rows": {"heads": (128, 1)},
    "one request": {"lengths": [16384]},
    "one odd request": {"lengths": [30_011], "config": ONE},
    "whole requests": {"lengths": [4096] * 132},
    "shares of two tiles": {"config": replace(PAIR, least=2), "lengths": [3001, 900]},
    "window": {"mask_mod": sliding_window(700), "bias": True},
    "softcap": {"score_mod": softcap(20.0)},
    "many short requests": {"lengths": [1 + 37 * i % 200 for i in range(511)]},
}


def check_case(
    heads=(48, 1), q_len=1, D=128, lengths=LENGTHS, dtype=torch.bfloat16, page=16, bias=False,
    sinks=False, **about,
):  # fmt: skip
    lengths = with_rows(lengths, q_len)
    each = batch([q_len] * len(lengths), lengths, *heads, D, dtype=dtype, device="cuda")
    if bias:
        about["score_mod"] = alibi(heads[0], "cuda")
    sinks = torch.randn(heads[0], device="cuda") if sinks else None
    return check(each, page=page, sinks=sinks, **about)


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    check_case(runs=2, **{"config": PAIR, **CASES[name]})


SERVED = {
    "48 heads": {},
    "128 rows": {"heads": (128, 1), "lengths": LENGTHS * 3},
    "71 rows of 64 columns": {"heads": (71, 1), "D": 64, "lengths": [4096] * 60},
    "16 rows": {"heads": (16, 1)},
    "drafts": {"heads": (64, 8), "q_len": 4, "mask_mod": causal},
    "many work tiles": {"heads": (64, 8), "q_len": 2, "lengths": [1 + 37 * i for i in range(40)]},
    "500 requests": {"lengths": [1 + 37 * i % 900 for i in range(500)], "sinks": True},
    "one key": {"lengths": [1]},
    "contiguous": {"page": 0},
    "pages of 256": {"page": 256},
    "a mask of every tile": {"mask_mod": checkerboard(3)},
    "softcap": {"score_mod": softcap(20.0), "mask_mod": sliding_window(700)},
}


@pytest.mark.parametrize("name", SERVED)
def test_the_default(name):
    """Plans without a config, whose template the static default is."""
    plan = check_case(**SERVED[name])
    if plan.origin.startswith("static default"):
        assert plan.config in DEFAULTS


@pytest.mark.parametrize("shared", ["K", "V", "KV"])
def test_keys_that_all_requests_share(shared):
    """By a stride of 0, which no descriptor has."""
    each = batch([1] * 7, LENGTHS, 48, 1, 128, dtype=torch.bfloat16, device="cuda")
    plan = plan_for(each)
    assert_right_of_shared_keys(plan, each, shared)


def test_chunks_of_prefill():
    lengths, about = [2000, 1400, 77, 650], {"dtype": torch.bfloat16, "device": "cuda"}
    each = batch([1, 77, 0, 2], lengths, 48, 1, 128, **about)
    plan = plan_for(each, page=16, config=PAIR, ragged=True, mask_mod=causal)
    assert_right(run(plan, each), each, mask_mod=causal)


def test_graphs_of_both_kernels():
    """Replayed back to back, each launch waits for the kernel that merged before it."""
    lengths = [8192 - 64 * i for i in range(16)]
    each = batch([1] * 16, lengths, 48, 1, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.stack([x.new_zeros(8192, 1, 128)] * 16) for x in (each.k[0], each.v[0]))
    for b in range(16):
        k[b, : each.kv_lens[b]], v[b, : each.kv_lens[b]] = each.k[b], each.v[b]
    lens, q = each.numbers(each.kv_lens), each.q[:, None]
    for config in (PAIR, *DEFAULTS, ServingConfig(64, 64, 4, 3, combine="dependent")):
        plan = plan_for(each, config=config)
        out, lse = plan.run(q, (k, v), seq_lens=lens)
        wanted = out.clone(), lse.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                out, lse = plan.run(q, (k, v), seq_lens=lens)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
