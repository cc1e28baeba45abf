"""A band beside documents, and rows that end early in a block, run in plain Python."""

import pytest
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import causal, sliding_window, softcap
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from tests.unit.kernels.hopper_backward.test_emulated import (
    PIPELINES,
    assert_gradients,
    documents,
    drawn,
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
    score, mask = softcap(3.0) if capped else None, and_masks(documents, BESIDE_DOCUMENTS[beside])
    assert_gradients(config, *drawn((40, 40)), mask, monkeypatch, score_mod=score)


def test_rows_that_end_early_in_their_block(monkeypatch):
    """A run of blocks reaches past them, to what would be tiles of the next head."""
    config = HopperBackwardConfig(64, 128, 2, **PIPELINES["persistent"])
    assert_gradients(config, *drawn((40, 40), lengths=(150, 200)), causal, monkeypatch)
