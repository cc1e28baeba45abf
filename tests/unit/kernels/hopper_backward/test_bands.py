"""A band beside documents, and rows that end early in a block, run in plain Python."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.reference import attention
from tests.unit.kernels.hopper_backward.test_emulated import (
    PIPELINES,
    assert_gradients,
    documents,
    gradients,
)

BESIDE_DOCUMENTS = {
    "past": causal,
    "to come": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 40,
    "window": sliding_window(40),
    "both sides": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= 40) & (kv_idx - q_idx < 20),
    "nothing": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx + 5) & (q_idx < kv_idx),
    "far": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 2**31 - 10,
}


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("beside", BESIDE_DOCUMENTS)
def test_a_band_beside_documents(beside, capped, meets, monkeypatch):
    """A band is compared apart; beside a score_mod masked tiles read lse late."""
    monkeypatch.setattr("flexattn.kernels.hopper_backward.source.waits_meet", lambda: meets)
    form = {**PIPELINES["persistent trimmed"], "ds_first": True, "early_lse": "half"}
    config = HopperBackwardConfig(64, 128, 2, **form, dp_rs=not capped)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, 40).double() for n in (210, 200, 200, 210))
    score, mask = softcap(3.0) if capped else None, and_masks(documents, BESIDE_DOCUMENTS[beside])
    found, lists = gradients(config, q, k, v, dout, mask, monkeypatch, score_mod=score)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _, _ = attention(*leaves, score_mod=score, block_mask=lists, scale=0.1)
    for ours, wanted in zip(found, torch.autograd.grad(out, leaves, dout), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_end_early_in_their_block(monkeypatch):
    """A run of blocks reaches past them, to what would be tiles of the next head."""
    config = HopperBackwardConfig(64, 128, 2, **PIPELINES["persistent"])
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 2, 150, 40, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 2, 200, 40, dtype=torch.float64) for _ in range(2))
    assert_gradients(config, (q, k, v), dout, causal, monkeypatch)
