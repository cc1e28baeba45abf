"""Beside torch: what is handed over to its compiled kernel."""

import logging

import torch

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.frontend.install import torch_flex_attention
from flexattn.reference import Precision, attention
from tests.support import block_mask, inputs, sinks


def tensors(grad=False):
    found = inputs(1, 4, 2, 256, 256, 64, dtype=torch.bfloat16, device="cuda")
    return [x.requires_grad_(grad) for x in found]


class _Halved(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1.5

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def test_a_mod_with_a_function_is_handed_to_torch_and_says_so_once(caplog):
    q, k, v = tensors(grad=True)
    mask = block_mask(causal, q, k, 128, False, False)

    def halved(score, b, h, q_idx, kv_idx):
        return _Halved.apply(score)

    call = {"score_mod": halved, "block_mask": mask, "enable_gqa": True}
    assert flexattn.explain(q, k, v, **call).route == "torch"
    with caplog.at_level(logging.WARNING, "flexattn"):
        for _ in range(2):
            out = flexattn.flex_attention(q, k, v, kernel_options={"SPLIT_KV": 2}, **call)
    said = [r.getMessage() for r in caplog.records if "handed to torch" in r.getMessage()]
    assert len(said) == 1 and "query requires grad" in said[0]
    weight = torch.randn_like(out)
    mine = torch.autograd.grad((out * weight).sum(), (q, k, v))
    out = torch_flex_attention()(q, k, v, **call)
    theirs = torch.autograd.grad((out * weight).sum(), (q, k, v))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(mine, theirs, strict=True))


def test_training_is_a_kernel_s():
    q, k, v = tensors(grad=True)
    found = flexattn.explain(q, k, v, softcap(50.0), enable_gqa=True)
    assert found.route == "kernel" and found.backward is not None


def test_no_grad_runs_our_kernel():
    q, k, v = tensors(grad=True)
    with torch.no_grad():
        assert flexattn.explain(q, k, v, enable_gqa=True).route == "kernel"
        assert not flexattn.flex_attention(q, k, v, enable_gqa=True).requires_grad


def test_training_with_sinks_has_the_gradients_of_the_oracle():
    q, k, v = inputs(1, 4, 2, 256, 256, 64, device="cuda")
    logits = sinks(4, device="cuda")
    mask = block_mask(causal, q, k)
    weight = torch.randn(1, 4, 256, 64, device="cuda")

    def gradients(function, *given):
        given = [x.detach().clone().requires_grad_() for x in given]
        out, lse = function(*given)
        return torch.autograd.grad((out * weight).sum() + lse.sum(), given)

    def ours(q, k, v, sinks):
        call = {"block_mask": mask, "enable_gqa": True, "sinks": sinks}
        assert flexattn.explain(q, k, v, **call).route == "kernel"
        return flexattn.flex_attention(q, k, v, return_lse=True, **call)

    def oracle(q, k, v, sinks):
        call = {"block_mask": mask, "sinks": sinks, "precision": Precision.ORACLE}
        return attention(q, k, v, **call)[:2]

    mine = gradients(ours, q, k, v, logits)
    theirs = gradients(oracle, *(x.double() for x in (q, k, v, logits)))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
