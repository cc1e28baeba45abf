"""Scores near float32's end on a GPU: finfo.min, the usual "masked", means what torch means."""

import pytest
import torch

from flexattn import flex_attention
from flexattn.reference import attention
from tests.support import ON_SM_90

LEAST = torch.finfo(torch.float32).min
TEMPLATES = [pytest.param("GLUON", marks=ON_SM_90), "TRITON", "TRITON_DECODE"]


def padded(s, b, h, i, j):
    return torch.where(i >= 3, torch.full_like(s, LEAST), s)


def large(s, b, h, i, j):
    return torch.where(i >= 3, torch.full_like(s, 3e38), s)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("backend", TEMPLATES)
@pytest.mark.parametrize("kind", ["padded", "large", "bias", "sinks"])
def test_rows_at_the_end(D, backend, kind):
    L = 5 if backend == "TRITON_DECODE" else 133
    q, k, v = (torch.randn(1, 2, n, D, device="cuda", dtype=torch.bfloat16) for n in (L, 300, 300))
    bias = torch.zeros(L, 300, device="cuda")
    bias[3:] = LEAST
    mods = {"padded": padded, "large": large, "bias": lambda s, b, h, i, j: s + bias[i, j]}
    call = {"score_mod": mods.get(kind)}
    if kind == "sinks":
        call["sinks"] = torch.tensor([float("inf"), LEAST], device="cuda")
    out, lse = flex_attention(
        q, k, v, return_lse=True, kernel_options={"BACKEND": backend}, **call
    )
    want = attention(q, k, v, **call)
    assert torch.allclose(out.float(), want.out.float(), atol=2e-2)
    assert torch.allclose(lse, want.lse, rtol=1e-2)


def test_gradients_are_finite():
    q, k, v = (
        torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (133, 300, 300)
    )
    out = flex_attention(q, k, v, score_mod=padded)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in grads)
