"""First launches on a GPU: faults are found, a captured graph is safe, and the cost is small."""

import pytest
import torch

from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import causal, softcap
from flexattn.reference import attention
from flexattn.serving import AppendPlan, DecodePlan
from flexattn.settings import override
from tests.planted import planted

CAP = softcap(20.0)


@pytest.fixture(autouse=True)
def first(tmp_path):
    with override(verify="first", strict=False, cache_dir=tmp_path, check=False):
        yield


def made(L, S, D, B=2, heads=(8, 2)):
    torch.manual_seed(0)
    return [
        torch.randn(B, h, n, D, device="cuda", dtype=torch.bfloat16)
        for h, n in ((heads[0], L), (heads[1], S), (heads[1], S))
    ]


def near(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("L", [1031, 1])
@pytest.mark.parametrize("gradients", [False, True])
def test_wrong_kernels_of_every_template_give_way(monkeypatch, D, L, gradients):
    q, k, v = (x.requires_grad_(gradients) for x in made(L, 1031, D))
    mask = create_block_mask(causal, None, None, L, 1031) if L > 1 else None
    call = {"score_mod": CAP, "block_mask": mask}
    want = attention(q, k, v, **call).out
    with planted(monkeypatch, "20.0", "16.0") as found:
        got = flex_attention(q, k, v, enable_gqa=True, **call)
        assert found and near(got, want)
        if gradients:
            w = torch.randn_like(want)
            grads = [torch.autograd.grad(x, (q, k, v), w.to(x.dtype)) for x in (got, want)]
            assert all(map(near, *grads))


def test_a_graph_that_is_captured_first(monkeypatch):
    """Nothing is computed while it is captured: a made-up call is judged on another stream."""
    q, k, v = made(300, 300, 64)
    want = attention(q, k, v, score_mod=CAP).out
    seen = []
    monkeypatch.setattr("flexattn.frontend.plan.judge_rows", seen.append)
    with planted(monkeypatch, "no such text", ""):
        flex_attention(q, k, v, enable_gqa=True)  # what torch loads at its first use
        seen.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = flex_attention(q, k, v, score_mod=CAP, enable_gqa=True)
        graph.replay()
        assert near(got, want) and not seen


def test_plans_are_verified_when_they_are_built():
    for form in ({}, {"page_size": 16, "mask_mod": causal, "q_len": 4}, {"total_q": 64}):
        plan = DecodePlan(batch=4, kv_len=4096, heads=(8, 2), head_dim=128, score_mod=CAP, **form)
        assert plan.run.__self__ is plan
    AppendPlan(heads=8, head_dim=128, page_size=16)


def test_no_fault_is_seen_in_right_kernels(caplog):
    """By dtype, head dimension and length, forward and back."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for D, L in ((32, 65), (64, 700), (96, 129), (128, 2048), (192, 333)):
            q, k, v = (x.to(dtype).requires_grad_() for x in made(L, L + 7, D))
            mask = create_block_mask(causal, None, None, L, L + 7)
            for mod in (None, CAP, lambda s, b, h, i, j: s + (i - j) * 0.01):
                out = flex_attention(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=True)
                out.float().square().sum().backward()
    assert "wrong" not in caplog.text and "not verified" not in caplog.text
