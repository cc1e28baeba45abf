"""Sinks on a GPU: every mod of the catalogue, decode with splits."""

import math

import pytest
import torch

from tests.cases import CASES
from tests.support import (
    DECODE,
    DTYPES,
    KINDS,
    assert_accurate,
    block_mask,
    call_of,
    inputs,
    sinks,
)

pytestmark = pytest.mark.usefixtures("poisoned")

# B, Hq, Hkv, L, S, D
SIZES = {"prefill": (2, 8, 2, 611, 747, 64), "decode": (3, 8, 2, 3, 2047, 64)}


@pytest.mark.parametrize(("kind", "dtype"), [("prefill", "bf16"), ("decode", "fp16")])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_case(entry, kind, dtype):
    given, call = call_of(entry, *SIZES[kind], dtype=DTYPES[dtype], device="cuda")
    logits = sinks(8, DTYPES[dtype], "cuda")
    assert_accurate(*given, kernel_options=KINDS[kind], sinks=logits, **call)


@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_adds_them_once_however_many_splits(dtype, splits):
    q, k, v = inputs(2, 64, 8, 1, 4095, 64, dtype=DTYPES[dtype], device="cuda")
    assert_accurate(
        q, k, v, kernel_options={**DECODE, "SPLIT_KV": splits}, sinks=sinks(64, device="cuda")
    )


@pytest.mark.parametrize("options", [*KINDS.values(), {**DECODE, "SPLIT_KV": 5}], ids=str)
def test_rows_without_a_key(options):
    q, k, v = inputs(1, 2, 1, 5, 600, 64, dtype=torch.bfloat16, device="cuda")
    logits = torch.tensor([0.75, -math.inf], device="cuda")
    mask = block_mask(lambda b, h, q_idx, kv_idx: q_idx > 2, q, k)
    got = assert_accurate(q, k, v, kernel_options=options, block_mask=mask, sinks=logits)
    assert not got.out[:, :, :3].any()
    assert torch.equal(got.lse[0, :, :3], logits[:, None].expand(2, 3))
