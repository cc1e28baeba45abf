"""MLA decode on Hopper, on a GPU: the tiles, the splits and the merge against the oracle."""

from dataclasses import replace

import pytest
import torch

from flexattn.catalogue import alibi, causal, sliding_window
from tests.odd_mods import checkerboard
from tests.serving import MLA, batch, check, with_rows
from tests.support import ON_SM_90

pytestmark = [pytest.mark.usefixtures("poisoned"), ON_SM_90]
FEW = replace(MLA, BLOCK_M=16, BLOCK_N=64, num_stages=3)
TWO = replace(FEW, num_stages=2)
WIDER = replace(TWO, BLOCK_M=32)
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
    "a mask in every tile": {"heads": 20, "q_len": 4, "mask_mod": checkerboard(3)},
    "few rows": {"config": FEW},
    "few rows, two slots": {"config": TWO, "lengths": [*LENGTHS, 16384]},
    "few rows, pages of 16": {"config": FEW, "page": 16},
    "few rows, pages of 32": {"config": TWO, "page": 32},
    "few rows, pages of 256, HND": {"config": FEW, "page": 256, "layout": "HND"},
    "few rows, contiguous": {"config": TWO, "page": 0, "heads": 33},
    "few rows, float16": {"config": FEW, "dtype": torch.float16, "sinks": True},
    "few rows, drafts": {"config": FEW, "heads": 4, "q_len": 4, "mask_mod": causal},
    "few rows, window": {"config": TWO, "mask_mod": sliding_window(700), "bias": True},
    "few rows, one request": {"config": TWO, "lengths": [16384]},
    "few rows, one odd request": {"config": FEW, "lengths": [30_011]},
    "few rows, whole requests": {"config": FEW, "lengths": [4096] * 132},
    "few rows, halves": {"config": FEW, "lengths": [4096] * 64},
    "32 rows": {"config": WIDER, "heads": 32},
    "32 rows, drafts": {"config": WIDER, "heads": 16, "q_len": 2, "mask_mod": causal},
    "32 rows, pages of 16": {"config": WIDER, "heads": 24, "page": 16},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    about = {"config": MLA, "page": 64, **CASES[name]}
    heads, q_len = about.pop("heads", 16), about.pop("q_len", 1)
    lengths, dtype = about.pop("lengths", LENGTHS), about.pop("dtype", torch.bfloat16)
    lengths = with_rows(lengths, q_len)
    each = batch([q_len] * len(lengths), lengths, heads, 1, 576, 512, dtype, "cuda")
    each = replace(each, v=[x[..., :512] for x in each.k])
    if about.pop("bias", False):
        about["score_mod"] = alibi(heads, "cuda")
    sinks = torch.randn(heads, device="cuda") if about.pop("sinks", False) else None
    check(each, runs=2, shared_kv=True, sinks=sinks, **about)
