"""Sinks on a GPU: every mod of the catalogue, decode with splits, and training handed over."""

import math

import pytest
import torch

import flexattn
from flexattn.catalogue import CASES
from flexattn.reference import Precision, attention
from tests.support import DECODE, DTYPES, KINDS, assert_accurate, block_mask, inputs, sinks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# B, Hq, Hkv, L, S, D
SIZES = {"prefill": (2, 8, 2, 611, 747, 64), "decode": (3, 8, 2, 3, 2047, 64)}


@pytest.mark.parametrize(("kind", "dtype"), [("prefill", "bf16"), ("decode", "fp16")])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_every_case(entry, kind, dtype):
    B, Hq, Hkv, L, S, D = SIZES[kind]
    built = entry.make(B, Hq, Hkv, L, S, device="cuda", dtype=DTYPES[dtype])
    q, k, v = inputs(B, Hq, Hkv, L, S, D, dtype=DTYPES[dtype], device="cuda")
    assert_accurate(
        q, k, v,
        score_mod=built.score_mod,
        block_mask=block_mask(built.mask_mod, q, k),
        kernel_options=KINDS[kind],
        sinks=sinks(Hq, DTYPES[dtype], "cuda"),
    )  # fmt: skip


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


def test_training_has_the_gradients_of_the_oracle():
    q, k, v = inputs(1, 4, 2, 256, 256, 64, device="cuda")
    logits = sinks(4, device="cuda")
    mask = block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, q, k)
    weight = torch.randn(1, 4, 256, 64, device="cuda")

    def gradients(function, *given):
        given = [x.detach().clone().requires_grad_() for x in given]
        out, lse = function(*given)
        return torch.autograd.grad((out * weight).sum() + lse.sum(), given)

    def handed_over(q, k, v, sinks):
        call = {"block_mask": mask, "enable_gqa": True, "sinks": sinks}
        assert flexattn.explain(q, k, v, **call).route == "torch"
        return flexattn.flex_attention(q, k, v, return_lse=True, **call)

    def oracle(q, k, v, sinks):
        call = {"block_mask": mask, "sinks": sinks, "precision": Precision.ORACLE}
        return attention(q, k, v, **call)[:2]

    mine = gradients(handed_over, q, k, v, logits)
    theirs = gradients(oracle, *(x.double() for x in (q, k, v, logits)))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
