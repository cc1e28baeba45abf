"""Hopper's backward without the tiles whose weights vanish: its gradients are the same bits."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from flexattn.catalogue import causal, causal_offset, document, sliding_window
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.reference import attention
from tests.unit.kernels.hopper_backward.test_emulated import GQA, MHA, PIPELINES, drawn, gradients

CONFIG = HopperBackwardConfig(64, 128, 2)
# Steep, of one tile or two; flat; level.
SLOPES = torch.tensor([4.0, 1.5, 0.01, 0.0])
LENGTHS = 270, 290
DOCUMENTS = torch.arange(700) // 150


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def tiles_with_weights(window, mask_mod, config, batches):
    """M_BLOCK_MAX and N_BLOCK_MIN [batches, 4, ...], from all that a mask keeps."""
    rows, keys = (torch.arange(n) for n in LENGTHS)
    kept = torch.ones(LENGTHS, dtype=torch.bool)
    if mask_mod is not None:
        kept = mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], keys[None, :])
    num_tiles = -(-LENGTHS[1] // config.BLOCK_N)
    found = []
    for each in window:
        first = []
        for tile in kept.split(config.BLOCK_M):
            every = tile.all(0).nonzero()
            last = int(every.max()) if len(every) else -1
            reached = max(0, last - int(each)) // config.BLOCK_N
            first.append(reached if tile.any() else num_tiles)
        first = torch.tensor(first).flip(0).cummin(0).values.flip(0)
        found.append(([int((first <= n).sum()) for n in range(num_tiles)], first.tolist()))
    return tuple(torch.tensor(x).int().repeat(batches, 1, 1) for x in zip(*found, strict=True))


MASKS = {
    "full": None,
    "causal": causal,
    "ahead": causal_offset(40),
    "behind": causal_offset(-70),
    "window": sliding_window(200),
    "documents": and_masks(document(DOCUMENTS), causal),
}
FORMS = [
    ("plain", "full", (64, 64, 2), MHA),
    ("plain", "documents", (64, 64, 2), MHA),
    ("halves", "causal", (64, 128, 2), GQA),
    ("dk halves", "causal", (128, 128, 2), MHA),
    ("dk", "ahead", (64, 64, 3), MHA),
    ("shifted", "full", (64, 128, 3), GQA),
    ("ds first", "causal", (64, 128, 2), GQA),
    ("by product", "full", (64, 64, 2), GQA),
    ("by product", "causal", (64, 64, 2), MHA),
    *(("deterministic", mask, (64, 64, 2), MHA) for mask in MASKS),
    ("deterministic dk", "full", (64, 64, 2), GQA),
    ("deterministic dk", "causal", (64, 64, 2), GQA),
]


@pytest.mark.parametrize(("name", "mask", "tile", "heads"), FORMS, ids=str)
def test_gradients(name, mask, tile, heads, monkeypatch):
    config = HopperBackwardConfig(*tile, **PIPELINES[name])
    batches, kv_heads = (1, 4) if heads == MHA else (2, 2)  # which share their keys
    (q, k, v), dout = drawn((40, 40), (4, kv_heads), LENGTHS, (batches, 1))
    norms = 2.02 * 0.1 * 1.4427 * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    window = ((norms + 150) / (SLOPES * 1.4427)).ceil().clamp(max=2**27)
    tiles = tiles_with_weights(window, MASKS[mask], config, batches)
    assert (tiles[0][0, 0] < tiles[0][0, 3]).any()
    (found, block_mask), (whole, _) = (
        gradients(config, q, k, v, dout, MASKS[mask], monkeypatch, score_mod=alibi, tiles=each)
        for each in (tiles, None)
    )
    for ours, wanted in zip(found, whole, strict=True):
        assert torch.equal(ours, wanted)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _, _ = attention(q, k, v, score_mod=alibi, block_mask=block_mask, scale=0.1)
    for ours, wanted in zip(found, torch.autograd.grad(out, (q, k, v), dout), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-3, atol=1e-3)
