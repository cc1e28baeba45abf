"""Keys and values narrower than the queries on a GPU: loads through descriptors and pointers."""

import pytest
import torch

from flexattn.catalogue import causal, softcap
from flexattn.problem import NARROWER
from tests.support import DECODE, PREFILL, assert_accurate, block_mask, inputs

pytestmark = pytest.mark.usefixtures("poisoned")
PAIRS = [(q, kv) for q, narrower in NARROWER.items() for kv in narrower]


@pytest.mark.parametrize("form", ["tma", "pointers", "decode"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("wide", "narrow"), PAIRS, ids=str)
def test_every_pair(wide, narrow, D, form):
    # The worst of a few rows says little of a kernel: decoding has few in a batch.
    batch, rows = (24, 5) if form == "decode" else (2, 301)
    q, k, v = inputs(batch, 4, 2, rows, 555, D, device="cuda")
    q, k, v = q.to(wide), k.to(narrow), v.to(narrow)
    options = DECODE if form == "decode" else {**PREFILL, "USE_TMA": form == "tma"}
    mask = block_mask(causal, q, k)
    assert_accurate(q, k, v, score_mod=softcap(5.0), block_mask=mask, kernel_options=options)


@pytest.mark.parametrize("D", [40, 66, 80, 94, 96, 112, 160])
def test_without_options_and_with_head_dimensions_of_no_power(D):
    """Of D 80 and 96 the first tile was wrong, of D 66 and 94 memory of others was read."""
    q, k, v = inputs(1, 4, 4, 300, 300, D, device="cuda")
    eight = torch.float8_e4m3fn
    assert_accurate(q.half(), k.to(eight), v.to(eight))
    assert_accurate(q[:, :, :3].half(), k.to(eight), v.to(eight))
