"""FLEXATTN_CHECK=1 beside kernels, which read 0 outside of a captured tensor."""

import pytest
import torch

import flexattn
from flexattn.errors import CaptureError
from flexattn.reference import attention
from flexattn.settings import override
from tests.support import KINDS, block_mask, inputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_table_is_read_as_zeros_or_refused(kind):
    """Every call is checked anew: what an index is read from may be written to between two."""
    table, places = torch.linspace(-1, 1, 9), torch.arange(53) % 9

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[places[kv_idx]]

    q, k, v = inputs(B=1, Hq=1, L=9)
    asked = {"score_mod": score_mod, "enable_gqa": True, "kernel_options": KINDS[kind]}
    with override(check=True):
        flexattn.flex_attention(q, k, v, **asked)
        places[52] = 9
        with pytest.raises(CaptureError, match=r"reads table, float32\[9\], at 9"):
            flexattn.flex_attention(q, k, v, **asked)
    with override(check=False):
        out = flexattn.flex_attention(q, k, v, **asked)
    padded = torch.cat([table, torch.zeros(1)])
    exact = attention(q, k, v, score_mod=lambda s, b, h, m, n: s + padded[places[n]]).out
    torch.testing.assert_close(out, exact)


def test_a_mask_of_a_short_table():
    ids = torch.zeros(40, dtype=torch.int32)

    def mask_mod(b, h, q_idx, kv_idx):
        return ids[kv_idx] == 0

    q, k, v = inputs()
    with override(check=False):
        mask = block_mask(mask_mod, q, k, 16)
    with override(check=True), pytest.raises(CaptureError, match=r"mask_mod .* reads ids"):
        flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
