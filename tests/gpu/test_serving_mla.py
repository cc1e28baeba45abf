"""MLA decode on Hopper, on a GPU: the tiles, the splits and the merge against the oracle."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from flexattn.kernels.paged_decode.awaiting import UNWRITTEN
from flexattn.serving import DecodePlan, ServingConfig
from flexattn.settings import override
from tests.serving import assert_right, batch, plan_for, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="the template is for sm_90",
    ),
]
MLA = ServingConfig(64, 128, 4, 1, 1, combine="launch", split_policy="whole")
AWAIT = replace(MLA, combine="await")
SEESAW = replace(MLA, schedule="seesaw")
LENGTHS = [2047, 0, 1, 517, 4096, 33, 128]
CASES = {
    "16 heads": {},
    "128 heads": {"heads": 128},
    "pages of 16": {"page": 16},
    "pages of 256, HND": {"page": 256, "layout": "HND"},
    "contiguous": {"page": 0, "heads": 33},
    "float16": {"dtype": torch.float16, "sinks": True},
    "drafts": {"heads": 20, "q_len": 4, "mask_mod": causal},
    "one request": {"lengths": [16384]},
    "one odd request of 128 heads": {"lengths": [30_011], "heads": 128},
    "whole requests": {"lengths": [4096] * 64, "heads": 128, "page": 256},
    "shares of two tiles": {"config": replace(MLA, least=2), "lengths": [3001, 900]},
    "window": {"mask_mod": sliding_window(700), "bias": True},
    "seesaw": {"config": SEESAW, "sinks": True},
    "seesaw, 128 heads": {"config": SEESAW, "heads": 128, "page": 16},
    "seesaw, drafts": {"config": SEESAW, "heads": 20, "q_len": 4, "mask_mod": causal, "page": 0},
    "seesaw, window": {"config": SEESAW, "mask_mod": sliding_window(700), "bias": True},
    "seesaw, whole requests": {"config": SEESAW, "lengths": [4096] * 64, "heads": 128},
    "seesaw, awaited": {"config": replace(SEESAW, combine="await"), "lengths": [16384]},
    "awaited": {"config": AWAIT, "sinks": True},
    "awaited, 128 heads": {"config": AWAIT, "heads": 128},
    "awaited, one request": {"config": AWAIT, "lengths": [16384]},
    "awaited, one odd request of 128 heads": {
        "config": AWAIT,
        "lengths": [30_011],
        "heads": 128,
        "page": 0,
    },
    "awaited, drafts": {"config": AWAIT, "heads": 20, "q_len": 4, "mask_mod": causal},
    "awaited, 64 requests": {"config": AWAIT, "lengths": [4096] * 64},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    about = dict(CASES[name])
    heads, q_len = about.pop("heads", 16), about.pop("q_len", 1)
    lengths, dtype = about.pop("lengths", LENGTHS), about.pop("dtype", torch.bfloat16)
    each = batch([q_len] * len(lengths), lengths, heads, 1, 576, 512, dtype, "cuda")
    each = replace(each, v=[x[..., :512] for x in each.k])
    page, layout = about.pop("page", 64), about.pop("layout", "NHD")
    config, sinks = about.pop("config", MLA), about.pop("sinks", False)
    if about.pop("bias", False):
        about["score_mod"] = alibi(heads, "cuda")
    plan = plan_for(
        each, page=page, config=config, layout=layout, shared_kv=True, sinks=sinks, **about
    )
    call = {"sinks": torch.randn(heads, device="cuda")} if sinks else {}
    for _ in range(2):
        got = run(plan, each, layout=layout, **call)
        assert_right(got, each, **call, **about)


def test_counters_go_back_in_replays_of_a_graph():
    """Lengths of the replays have few parts, many and none; each has the bits of a plain run."""
    heads, keys = 16, 16384
    draw = torch.Generator("cuda").manual_seed(1)
    about = {"generator": draw, "dtype": torch.bfloat16, "device": "cuda"}
    cache = torch.randn(4 * keys // 64, 64, 1, 576, **about)
    q = torch.randn(4, 1, heads, 576, **about)
    table = torch.arange(4 * keys // 64, dtype=torch.int32, device="cuda").view(4, -1)
    plan, other = (
        DecodePlan(
            batch=4, kv_len=keys, heads=(heads, 1), head_dim=(576, 512), page_size=64,
            shared_kv=True, config=AWAIT,
        )
        for _ in "ab"
    )  # fmt: skip
    lens = torch.full((4,), keys, dtype=torch.int32, device="cuda")
    call = {"seq_lens": lens, "block_table": table}
    with override(check=False):
        plan.run(q, cache, **call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = plan.run(q, cache, **call)
        for each in ([keys, 0, 0, 0], [keys] * 4, [1, 2, 3, 4], [9000, 1, 0, 16000]) * 25:
            lens.copy_(torch.tensor(each, dtype=torch.int32))
            got.fill_(float("nan"))
            graph.replay()
            assert torch.equal(got, other.run(q, cache, **call))
    counters = plan._workspace.view(torch.int32)[-2 * plan._kernels.programs :]
    assert counters.eq(UNWRITTEN).all()
