"""warm(): after it, the calls of a workload compile nothing."""

import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.runtime.build import builder
from tests.support import assert_accurate, inputs


def test_calls_after_warm_compile_nothing():
    workload = {
        "layers": [
            {
                "heads": [6, 2],
                "head_dim": 96,
                "score": {"mod": "flexattn.catalogue.scores:softcap", "args": [17.0]},
                "calls": [
                    {"name": "prefill", "mask": "flexattn.catalogue:causal", "q_len": [700]},
                    {"name": "decode", "mixes": [[2, 1, 700]]},
                ],
            }
        ]
    }
    assert flexattn.warm(workload) > 0
    before = builder().compiled
    softcap = flexattn.catalogue.scores.softcap(17.0)
    for L, S in ((700, 700), (1, 700)):
        q, k, v = inputs(2, 6, 2, L, S, 96, dtype=torch.bfloat16, device="cuda")
        mask = flexattn.create_block_mask(causal, None, None, L, S) if L > 1 else None
        with torch.no_grad():
            flexattn.flex_attention(q, k, v, score_mod=softcap, block_mask=mask, enable_gqa=True)
    assert builder().compiled == before
    assert_accurate(q, k, v, score_mod=softcap)
