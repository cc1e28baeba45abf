"""Defaults that sizes chose on a Hopper GPU: each is the one meant, and right by the gate."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal, sliding_window
from flexattn.settings import override
from tests.support import ON_SM_90, assert_accurate, block_mask, inputs

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
# B, Hq, Hkv, q_len, kv_len, D (or D and Dv), mask_mod, and what the sizes chose.
CASES = {
    "fewer rows": (1, 20, 20, 1499, 1501, 64, None, {"consumers": 2}),
    "rescaled at once": (1, 24, 24, 2047, 2049, 64, sliding_window(127), {"lazy_rescale": False}),
    "fewer rows at once": (32, 16, 16, 255, 255, 64, causal,
                           {"consumers": 2, "lazy_rescale": False}),
    "apart at once": (5, 16, 16, 4999, 255, 128, None, {"lazy_rescale": False}),
    "splits of tall tiles": (5, 64, 8, 17, 8193, 64, None, {"BLOCK_M": 64, "num_splits": 3}),
    "tiles apart": (1, 12, 12, 4999, 511, 128, None, {"cross_tile_pipeline": False}),
    "heads side by side": (1, 32, 8, 1023, 1023, 128, causal, {"order": "heads"}),
    "shared tiles": (9, 16, 4, 61, 1025, 128, None, {"pack_gqa": True}),
    "turns at 256": (1, 8, 4, 1999, 1999, 256, causal, {"ping_pong": True}),
    "turns at 192": (1, 8, 8, 1999, 1999, (192, 128), causal, {"ping_pong": True}),
    "one split": (8, 64, 8, 1, 4097, 64, sliding_window(127), {"num_splits": 1}),
    "more splits": (10, 32, 8, 1, 16385, 128, None, {"num_splits": 3}),
    "short prompt": (1, 71, 1, 447, 447, 64, causal, {"BLOCK_M": 64, "use_tma": True}),
    "short wide prompt": (1, 40, 8, 193, 193, 128, causal, {"BLOCK_M": 64, "BLOCK_N": 64}),
    "short heads of 72": (2, 16, 16, 197, 197, 72, None, {"BLOCK_M": 64, "num_warps": 4}),
    "short images": (64, 8, 8, 127, 127, 40, None, {"BLOCK_M": 128, "BLOCK_N": 32}),
    "two tiles under way": (3, 16, 1, 1, 999, (576, 512), None, {"num_stages": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_sizes_chose_is_right(name):
    B, Hq, Hkv, rows, keys, D, mask_mod, chosen = CASES[name]
    widths = D if isinstance(D, tuple) else (D, D)
    q, k, v = inputs(B, Hq, Hkv, rows, keys, *widths, dtype=torch.bfloat16, device="cuda")
    mask = block_mask(mask_mod, q, k, per_batch=False, per_head=False)
    with override(mode="off"):
        told = flexattn.explain(q, k, v, block_mask=mask, enable_gqa=True)
        assert {each: getattr(told.config, each) for each in chosen} == chosen, told
        assert_accurate(q, k, v, block_mask=mask, max_scores=False)
