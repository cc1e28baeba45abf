"""Forms of Hopper's template for head dimensions above 256, and gradients behind it, on a GPU."""

from dataclasses import replace

import pytest

from flexattn.catalogue import causal
from tests.gpu.test_head_dims import forms
from tests.gradients import assert_gradients
from tests.support import ON_SM_90, tensors

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    ON_SM_90,
]
TURNED = (
    {},
    {"consumers": 1},
    {"BLOCK_N": 32, "num_stages": 2, "k_parts": 1},
    {"k_parts": 2},
    {"k_parts": 8},
    {"k_parts": 1},
    {"tile_scheduler": "grid"},
    {"tile_scheduler": "static", "order": "heads"},
    {"tile_scheduler": "dynamic", "order": "sections"},
    {"ping_pong": True},
    {"lazy_rescale": False},
    {"merge_consumers": False},
    {"pack_gqa": True},
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["full", "causal"])
def test_every_form(mask_mod):
    def turned(start, structure):
        return (replace(start, **more) for more in TURNED)

    # Heads that share a tile would have lists of blocks of their own.
    refused = 0 if mask_mod is None else 1
    assert forms(*tensors(2, 4, 2, 301, 419, 512), turned, mask_mod) == len(TURNED) - refused


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_gradients(dropout_p):
    """The forward leaves its log-sum-exps to a backward that another template serves."""
    q, k, v = tensors(1, 4, 2, 301, 301, 512)
    assert_gradients(q, k, v, mask_mod=causal, block=128, dropout_p=dropout_p)
