"""Bands of masks: found; beside documents, and rows that end early in a block, in plain Python."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import causal, document, sliding_window, softcap
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.masks import Band, band_and_rest, band_of
from flexattn.mods import bind
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


def test_bands():
    def found(mask):
        return band_of(bind(mask, "mask").mod.expr)

    assert found(causal) == Band(0, None)
    assert found(lambda b, h, q, k: q > k + 3) == Band(4, None)
    assert found(lambda b, h, q, k: (q - k < 100) & (k - 7 <= q)) == Band(-7, 99)
    assert found(sliding_window(128)) is not None
    # Past every distance, and still added to one in 32 bits.
    assert found(lambda b, h, q, k: (q - k <= 2**40) & (k - q < 2**31 - 9)) == Band(
        -(2**30), 2**30
    )
    assert found(document(torch.zeros(8).int())) is None
    assert found(lambda b, h, q, k: q + k > 3) is None
    assert found(lambda b, h, q, k: q - h > k) is None


def test_what_a_mask_asks_for_beside_its_band():
    ids = torch.arange(8).int()

    def parts(*masks):
        expr = bind(and_masks(*masks), "mask").mod.expr
        band, rest = band_and_rest(expr)
        return band, rest == bind(document(ids), "mask").mod.expr

    assert parts(document(ids), causal) == (Band(0, None), True)
    assert parts(document(ids), lambda b, h, q, k: q - k < 9) == (Band(None, 8), True)
    assert parts(sliding_window(128), document(ids)) == (Band(0, 128), True)
    nowhere = lambda b, h, q, k: (q < k) & (k < q)  # noqa: E731
    assert parts(nowhere, document(ids)) == (None, False)
    assert parts(document(ids)) == (None, True)
    assert parts(causal)[0] == Band(0, None)
