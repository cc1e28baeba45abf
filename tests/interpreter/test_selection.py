"""Keys that data choose: results and gradients by kernels, for whatever indices say."""

from dataclasses import replace

import pytest
import torch

from flexattn import Selection, flex_attention
from flexattn.catalogue import causal
from flexattn.frontend.launch_cache import launch_cache
from tests.selections import drawn, pairs

pytestmark = pytest.mark.usefixtures("poisoned")


def oracle(q, k, v, kept):
    """In float64; a row without keys gives zeros."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf)
    weights = torch.where(kept.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return weights.masked_fill(~kept, 0.0) @ v


def made(sizes, width=16):
    batch, Hq, Hkv, q_len, kv_len = sizes
    draw = torch.Generator().manual_seed(sum(sizes))
    shapes = ((Hq, q_len), (Hkv, kv_len), (Hkv, kv_len))
    return [torch.randn(batch, h, n, width, generator=draw) for h, n in shapes]


@pytest.mark.parametrize("seed", range(10))
def test_drawn_blocks(seed):
    selection, sizes = drawn(seed)
    q, k, v = made(sizes)
    out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    batch, Hq, _, q_len, kv_len = sizes
    right = oracle(q, k, v, pairs(selection, batch, Hq, q_len, kv_len))
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_rows_and_tokens(seed):
    selection, sizes = drawn(seed, (1, 3, 16, 20))
    q, k, v = made(sizes)
    out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    batch, Hq, _, q_len, kv_len = sizes
    right = oracle(q, k, v, pairs(selection, batch, Hq, q_len, kv_len))
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_gradients(seed):
    selection, sizes = drawn(seed)
    batch, Hq, _, q_len, kv_len = sizes
    kept = pairs(selection, batch, Hq, q_len, kv_len)
    given = [x.requires_grad_() for x in made(sizes)]
    weights = torch.randn(batch, Hq, q_len, 16, generator=torch.Generator().manual_seed(seed))
    out = flex_attention(*given, block_mask=selection, enable_gqa=True)
    found = torch.autograd.grad((out * weights).sum(), given)
    right = torch.autograd.grad((oracle(*given, kept) * weights).sum(), given)
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graded", [False, True], ids=["", "gradients"])
def test_other_choices_have_the_same_launch(graded):
    """Each layer chooses anew: nothing is planned again, and nothing old is read."""
    q, k, v = made((1, 2, 2, 256, 256))
    if graded:
        q.requires_grad_()
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        selection = Selection(
            torch.randint(0, 4, (1, 2, 4, 2), generator=draw), None, 64, 64, causal
        )
        out = flex_attention(q, k, v, block_mask=selection)
        right = oracle(q, k, v, pairs(selection, 1, 2, 256, 256))
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)
        if graded:
            (found,) = torch.autograd.grad(out.square().sum(), [q])
            (other,) = torch.autograd.grad(right.square().sum(), [q])
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4)
        if not seed:
            known = len(launch_cache.launches())
    assert len(launch_cache.launches()) == known


def test_another_mask_of_the_same_form_has_its_own_launch():
    q, k, v = made((1, 2, 2, 128, 128))
    plain = Selection(torch.zeros(1, 1, 2, 1, dtype=torch.int32), None, 64, 64, None)
    for mask_mod in (causal, None, causal):
        selection = replace(plain, mask_mod=mask_mod)
        out = flex_attention(q, k, v, block_mask=selection)
        right = oracle(q, k, v, pairs(selection, 1, 2, 128, 128))
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)


def test_topk_of_scores():
    q, k, v = made((2, 4, 2, 256, 256))
    scores = torch.randn(2, 2, 4, 8)
    scores[0, 0, 1, 2] = torch.nan
    selection = Selection.from_topk(scores, 3, unit=32, rows=64, causal=True)
    assert selection.indices[0, 0, 0].max() < 2  # two blocks begin before row 64
    out = flex_attention(q, k, v, block_mask=selection, enable_gqa=True)
    right = oracle(q, k, v, pairs(selection, 2, 4, 256, 256))
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)
