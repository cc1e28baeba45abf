"""Training on a GPU: the example's losses, and what a repeated call with gradients does anew."""

import pytest
import torch

from examples import train_gpt
from flexattn import create_block_mask, flex_attention
from flexattn.catalogue import causal
from flexattn.frontend import autograd
from flexattn.frontend.launch_cache import launch_cache
from tests.support import inputs


@pytest.mark.parametrize("bias", ["learned", "alibi"])
def test_losses_lie_on_one_another(bias, capsys):
    sizes = "--batch 2 --length 512 --width 128 --heads 2 --depth 2 --steps 40 --rate 3e-3".split()
    curves = train_gpt.main([*sizes, "--bias", bias, "--beside", "reference"])
    ours, plain = map(torch.tensor, curves.values())
    # In bfloat16 steps drift apart; by a twentieth of what is learned, not by a share of it.
    assert (ours - plain).abs().max() < (plain[0] - plain[-1]) / 20
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("autocast", [False, True])
def test_a_repeated_call_is_planned_once(autocast, monkeypatch):
    launch_cache.clear()
    planned = []
    for owner, name in ((autograd, "plan"), (autograd, "plan_backward")):
        made = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, _made=made, _name=name: planned.append(_name) or _made(*a)
        )
    q, k, v = (
        x.requires_grad_()
        for x in inputs(2, 4, 4, 333, 333, 64, dtype=torch.bfloat16, device="cuda")
    )
    table = torch.linspace(-1, 1, 4, device="cuda").requires_grad_()
    mask = create_block_mask(causal, None, None, 333, 333, "cuda")

    def mod(s, b, h, q, k):
        return s + table[h]

    def gradients():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = flex_attention(q, k, v, mod, mask)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v, table))

    first = gradients()
    for _ in range(3):
        again = gradients()
        assert all(map(torch.equal, again[:3], first[:3]))
        torch.testing.assert_close(again[3], first[3])
    assert planned == ["plan", "plan_backward"]
