"""Keys and values narrower than the queries, converted in the kernels, beside the oracle."""

import pytest
import torch

import flexattn
from flexattn.catalogue import causal
from flexattn.problem import NARROWER
from tests.support import KINDS, PREFILL, assert_accurate, block_mask, inputs

E4M3 = torch.float8_e4m3fn
PAIRS = [(q, kv) for q, narrower in NARROWER.items() for kv in narrower]


def tensors(wide, narrow, *sizes):
    q, k, v = inputs(*sizes)
    return q.to(wide), k.to(narrow), v.to(narrow)


@pytest.mark.oldest
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wide", "narrow"), PAIRS, ids=str)
def test_every_pair(wide, narrow, kind):
    q, k, v = tensors(wide, narrow, 1, 2, 1, 19 if kind == "prefill" else 3, 41, 24)
    got = assert_accurate(
        q, k, v, block_mask=block_mask(causal, q, k, 16), kernel_options=KINDS[kind]
    )
    assert got.out.dtype == wide


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_eight_bits_without_alignment(kind):
    """NaN behind the last key and the last column: nothing of it is read."""
    memory = torch.full((2, 1, 2, 43, 27), torch.nan).to(E4M3)
    q, k, v = tensors(torch.float16, E4M3, 1, 2, 2, 19 if kind == "prefill" else 3, 41, 26)
    memory[..., :41, :26] = torch.stack((k, v))
    k, v = memory[..., :41, :26]
    assert_accurate(q, k, v, block_mask=block_mask(causal, q, k, 32), kernel_options=KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_that_of_wide_keys(kind):
    """The same numbers in the same order: only what is read from memory is narrower."""
    q, k, v = tensors(torch.float16, E4M3, 1, 4, 2, 17, 33, 16)
    call = {"enable_gqa": True, "kernel_options": KINDS[kind]}
    got = flexattn.flex_attention(q, k, v, **call)
    assert torch.equal(got, flexattn.flex_attention(q, k.half(), v.half(), **call))
    assert flexattn.explain(q, k, v, **call).route == "interpreter"


def test_keys_with_a_factor_of_their_head():
    """torch's tests of it: a score_mod multiplies by what the keys were divided by."""
    q, k, v = inputs(1, 2, 2, 17, 33, 16)
    factors = k.abs().amax((-2, -1)) / 448
    small = (k / factors[..., None, None]).to(E4M3)

    def scaled(score, b, h, q_idx, kv_idx):
        return score * factors[b, h]

    q, v = q.bfloat16(), v.to(E4M3)
    assert_accurate(q, small, v, score_mod=scaled, kernel_options=PREFILL)
