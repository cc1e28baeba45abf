"""Sinks in the real templates, in the CPU interpreter: prefill, decode, and the combine."""

import math

import pytest
import torch

import flexattn
from flexattn.catalogue import sliding_window
from tests.cases import case
from tests.covering import pairwise
from tests.support import DECODE, DTYPES, KINDS, assert_accurate, block_mask, inputs, sinks

# No mod, masks, empty rows, scores of every kind, a mod per head.
MODS = (
    "noop", "causal", "document", "random_blocks_empty_rows", "head_windows", "softcap_50",
    "alibi_causal_document", "relative_bias", "nested",
)  # fmt: skip
SPLITS = {**DECODE, "BLOCK_N": 16, "SPLIT_KV": 3}


def check(q, k, v, options, *, score_mod=None, mask_mod=None, block=16, **call):
    return assert_accurate(
        q, k, v, score_mod=score_mod, block_mask=block_mask(mask_mod, q, k, block),
        kernel_options=options, **call,
    )  # fmt: skip


@pairwise(name=MODS, kind=KINDS, dtype=["fp32", "fp16"])
def test_every_kind_of_mod(name, kind, dtype):
    built = case(name).make(2, 4, 2, 37, 53, dtype=DTYPES[dtype])
    q, k, v = inputs(2, 4, 2, 37, 53, dtype=DTYPES[dtype])
    check(q, k, v, KINDS[kind], score_mod=built.score_mod, mask_mod=built.mask_mod, sinks=sinks(4))


@pytest.mark.oldest
@pytest.mark.parametrize("options", [*KINDS.values(), SPLITS], ids=[*KINDS, "splits"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_sinks_of_every_dtype(dtype, options):
    """Seven query heads of one key head; a window that leaves splits without a key."""
    q, k, v = inputs(2, 7, 1, 3, 93)
    mask_mod = flexattn.and_masks(sliding_window(7), lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    for mask in (None, mask_mod):
        check(q, k, v, options, mask_mod=mask, sinks=sinks(7, DTYPES[dtype]))


@pytest.mark.parametrize("options", [*KINDS.values(), SPLITS], ids=[*KINDS, "splits"])
def test_rows_without_a_key_are_zero_and_have_their_sinks_lse(options):
    q, k, v = inputs(1, 2, 1, 5, 61)
    logits = torch.tensor([0.75, -math.inf])
    got = check(q, k, v, options, mask_mod=lambda b, h, q_idx, kv_idx: q_idx > 2, sinks=logits)
    assert not got.out[:, :, :3].any() and got.out[:, :, 3:].all()
    assert torch.equal(got.lse[0, :, :3], logits[:, None].expand(2, 3))
    assert (got.max_scores[:, :, :3] == -math.inf).all()


@pytest.mark.parametrize("options", [*KINDS.values(), SPLITS], ids=[*KINDS, "splits"])
def test_sinks_far_from_the_scores(options):
    """A sink beyond what float32's exp holds takes all but nothing, or nothing."""
    q, k, v = inputs(1, 3, 1, 5, 61)
    logits = torch.tensor([300.0, -300.0, -math.inf])
    got = check(q, k, v, options, sinks=logits)
    with torch.no_grad():
        plain, lse = flexattn.flex_attention(
            q, k, v, enable_gqa=True, kernel_options=options, return_lse=True
        )
    assert got.lse[0, 0].eq(300.0).all() and got.out[0, 0].abs().max() < 1e-30
    assert torch.equal(got.out[0, 1:], plain[0, 1:]) and torch.equal(got.lse[0, 1:], lse[0, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_are_read_at_run_time_whatever_their_stride(kind):
    q, k, v = inputs(1, 4, 2, 5, 61)
    wide = torch.linspace(-2, 2, 12)
    first = check(q, k, v, KINDS[kind], sinks=wide[::3])
    wide += 1.0
    second = check(q, k, v, KINDS[kind], sinks=wide[::3])
    assert (second.lse > first.lse).all()
