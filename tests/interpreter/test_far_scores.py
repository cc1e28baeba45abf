"""Scores near the end of float32: finfo.min, the usual "masked", means what it means in torch."""

import math

import pytest
import torch

import flexattn
from flexattn.reference import attention
from flexattn.serving import DecodePlan
from tests.support import DECODE, PREFILL

LEAST = torch.finfo(torch.float32).min
L, S = 21, 53
PAD = 15
TABLE = torch.zeros(S)
TABLE[3:9] = LEAST
DENSE = torch.where(torch.arange(L)[:, None] >= PAD, LEAST, 0.0).expand(L, S).contiguous()
NARROW = torch.where(DENSE == 0, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
HALF = torch.where(DENSE == 0, 0.0, torch.finfo(torch.float16).min).half()
DISTANT = torch.zeros(2 * S)
DISTANT[S + 5 :] = LEAST
KEPT = torch.arange(L) < PAD
MODS = {
    "where": lambda s, b, h, i, j: torch.where(i >= PAD, torch.full_like(s, LEAST), s),
    "large": lambda s, b, h, i, j: torch.where(i >= PAD, torch.full_like(s, 3e38), s),
    "by keys": lambda s, b, h, i, j: s + TABLE[j],
    "by rows and keys": lambda s, b, h, i, j: s + DENSE[i, j],
    "bfloat16": lambda s, b, h, i, j: s + NARROW[i, j],
    "float16": lambda s, b, h, i, j: torch.where(i >= PAD, HALF[i, j].float(), s),
    "by distance": lambda s, b, h, i, j: s + DISTANT[i - j + S],
    "product": lambda s, b, h, i, j: s * 0.5 + (1.0 - (j + i * 0 < KEPT[i] * S).float()) * LEAST,
    "exponential": lambda s, b, h, i, j: torch.where(j == 5, -torch.exp(88.7 + s * 0), s),
    "removed": lambda s, b, h, i, j: torch.where(i >= PAD, -math.inf, s + TABLE[j]),
}


def inputs(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 16, generator=draw, dtype=dtype) for n in (L, S, S)]


def assert_as_torch(found, want):
    torch.testing.assert_close(found[0].double(), want.out, rtol=1e-4, atol=1e-5)
    for name in ("lse", "max_scores"):
        torch.testing.assert_close(
            getattr(found[1], name).double(), getattr(want, name), rtol=1e-6, atol=1e-5
        )


@pytest.mark.oldest
@pytest.mark.parametrize("options", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", MODS)
def test_scores_near_the_end_of_float32(name, options):
    """finfo.min times log2(e) was -inf: a padded row gave zeros in place of the mean of V, with
    lse -inf, and 3e38 gave NaN."""
    q, k, v = inputs()
    asked = flexattn.AuxRequest(lse=True, max_scores=True)
    found = flexattn.flex_attention(
        q, k, v, score_mod=MODS[name], return_aux=asked, kernel_options=options
    )
    want = attention(q, k, v, score_mod=MODS[name])
    assert_as_torch(
        found, type(want)(*(x.double() for x in (want.out, want.lse, want.max_scores)))
    )
    if name in ("where", "by rows and keys"):
        torch.testing.assert_close(found[0][0, :, PAD], v[0].mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["where", "large", "by rows and keys", "removed"])
def test_gradients_beside_rows_of_such_scores(name, dtype):
    """Weights of padded rows were 2 to the power of what lse had lost: infinite, and NaN times the
    zero gradients of their outputs. Of the other rows nothing changes."""
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs())
    out = flexattn.flex_attention(q, k, v, score_mod=MODS[name], kernel_options=PREFILL)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dout[:, :, PAD:] = 0
    found = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    plain = (wide[0] @ wide[1].mT / 4)[:, :, :PAD]
    if name == "removed":
        plain = plain + TABLE.double()
    want = torch.autograd.grad(plain.softmax(-1) @ wide[2], wide, dout[:, :, :PAD].double())
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05
        )


@pytest.mark.parametrize("options", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_sinks_at_both_ends(options):
    """A sink of +inf made all NaN: it has all the weight. Beside no key finfo.min is lse."""
    q, k, v = inputs()
    sinks = torch.tensor([math.inf, LEAST])
    mask = flexattn.create_block_mask(lambda b, h, i, j: i != 4, None, None, L, S, "cpu", 32)
    out, lse = flexattn.flex_attention(
        q, k, v, block_mask=mask, sinks=sinks, return_lse=True, kernel_options=options
    )
    assert not out[:, 0].any() and bool((lse[:, 0] == math.inf).all())
    want = (q @ k.mT / 4)[:, 1].logsumexp(-1)
    want[:, 4] = LEAST
    torch.testing.assert_close(lse[:, 1], want, rtol=1e-6, atol=1e-5)


def test_far_scores_and_sinks_in_a_plan():
    q, k, v = torch.randn(3, 3, 40, 2, 32, generator=torch.Generator().manual_seed(0))
    q = q[:, :1].repeat(1, 1, 2, 1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(h % 2 == 1, torch.full_like(score, LEAST), score)

    plan = DecodePlan(
        batch=3, kv_len=40, heads=(4, 2), head_dim=32, dtype=torch.float32, score_mod=score_mod,
        lse=True, device="cpu", sinks=True,
    )  # fmt: skip
    lens, sinks = (
        torch.tensor([40, 7, 0], dtype=torch.int32),
        torch.tensor([0.0, -math.inf, math.inf, LEAST]),
    )
    out, lse = plan.run(q, (k, v), seq_lens=lens, sinks=sinks)
    torch.testing.assert_close(out[1, 0, 1], v[1, :7, 0].mean(0))
    torch.testing.assert_close(out[1, 0, 3], v[1, :7, 1].sum(0) / 8)  # the sink is one of 8
    torch.testing.assert_close(lse.view(3, 4)[:2, 1], torch.full((2,), LEAST), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.view(3, 4)[:, 3], torch.full((3,), LEAST), rtol=1e-6, atol=0)
    assert not out[:, 0, 2].any() and bool((lse.view(3, 4)[:, 2] == math.inf).all())
    assert out.isfinite().all()
