"""Dropout in the real templates, in the CPU interpreter: the reference's mask in every tile."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.reference.dropout import kept_weights
from tests.gradients import SEED, assert_gradients, drawn
from tests.support import DTYPES, PREFILL, assert_judged, block_mask, inputs, run, sinks

SMALL = {"BLOCK_M1": 16, "bwd_BLOCK_N1": 32, "BLOCK_M2": 32, "bwd_BLOCK_N2": 16}


def windowed(b, h, q, k):
    return (q >= k) & (q - k < 30)


@pytest.mark.oldest
@pytest.mark.parametrize(("M", "N"), [(16, 64), (64, 16), (32, 32)])
@pytest.mark.parametrize("block", [64, 40])
def test_tiles_drop_the_same_weights(M, N, block):
    """Values are the unit matrix, so that weights come out; blocks of 40 are cut at odd places."""
    q, k, _ = inputs(2, 2, 1, 37, 53)
    v = torch.eye(53).expand(2, 1, 53, 53).contiguous()
    mask = block_mask(lambda b, h, q, k: k <= q + 20, q, k, block)
    dropout = drawn(0.4, "cpu")
    wanted = kept_weights(dropout, tuple(torch.arange(n) for n in (2, 2, 37, 53)), 2)
    torch.manual_seed(SEED)
    tile = {**PREFILL, "BLOCK_M": M, "BLOCK_N": N}
    got = run(q, k, v, block_mask=mask, dropout_p=0.4, kernel_options=tile)
    seen = torch.arange(53) <= torch.arange(37)[:, None] + 20
    assert torch.equal(got.out != 0, wanted & seen)
    assert_judged(got, q, k, v, block_mask=mask, dropout=dropout)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_beside_mods_and_sinks(dtype):
    q, k, v = inputs(2, 4, 2, 37, 53, dtype=DTYPES[dtype])
    dropout, mask = drawn(0.25, "cpu"), block_mask(causal, q, k, 16)
    more = {"score_mod": softcap(5.0), "block_mask": mask, "sinks": sinks(4, DTYPES[dtype])}
    torch.manual_seed(SEED)
    got = run(q, k, v, dropout_p=0.25, **more)
    assert_judged(got, q, k, v, dropout=dropout, **more)


def test_few_rows_do_not_split_their_keys():
    q, k, v = inputs(1, 2, 1, 3, 93)
    dropout = drawn(0.4, "cpu")
    found = flexattn.explain(q, k, v, enable_gqa=True, dropout_p=0.4)
    assert found.template == "prefill" and "dropout" in found.problem
    torch.manual_seed(SEED)
    assert_judged(run(q, k, v, dropout_p=0.4), q, k, v, dropout=dropout)


CASES = {
    "plain": {},
    "causal, soft cap, sinks": {"mask_mod": causal, "make": lambda: softcap(5.0), "sinks": True},
    "blocks cut at odd places": {"mask_mod": windowed, "block": 24, "kernel_options": SMALL},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    case = dict(CASES[name])
    logits = sinks(4) if case.pop("sinks", False) else None
    assert_gradients(*inputs(2, 4, 2, 37, 45), dropout_p=0.4, sinks=logits, **case)


def test_gradients_of_half_precision_and_of_all_that_is_dropped():
    given = inputs(1, 2, 1, 21, 27, dtype=torch.bfloat16)
    assert_gradients(*given, dropout_p=0.1, mask_mod=causal)
    assert not any(x.any() for x in assert_gradients(*given, dropout_p=1.0, lse=False))


def test_checkpointing_gives_the_same_bits():
    given = [x.requires_grad_() for x in inputs(1, 2, 2, 21, 27)]

    def attend(q, k, v):
        return flexattn.flex_attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(7)
    plain = torch.autograd.grad(attend(*given).square().sum(), given)
    torch.manual_seed(7)
    checkpoint(attend, *given, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(given, plain, strict=True))
