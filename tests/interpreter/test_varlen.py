"""varlen_attn() on kernels: rows of sequences, forward and backward, against each by itself."""

import pytest
import torch

from flexattn import varlen_attn
from flexattn.catalogue import softcap
from flexattn.frontend import attention
from tests.packs import alone, offsets, pack

LENGTHS, KEYS = [3, 0, 70, 1, 61], [5, 2, 30, 0, 98]
capped = softcap(20.0)


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """Plain torch is for what is wanted: a call that took it would be compared with itself."""
    monkeypatch.setattr(attention, "_reference", None)


def results(call, keys):
    """out, lse, and gradients of q, k, v and of what a score_mod captures, in float64."""
    q, k, v, *cu = pack(LENGTHS, keys, heads=(2, 1))
    bias = torch.linspace(-1, 1, 2 * 33).view(2, 33)
    scales = torch.linspace(0.5, 1.5, len(LENGTHS))
    leaves = [x.requires_grad_() for x in (q, k, v, bias, scales)]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * scales[b] + bias[h, (q_idx - kv_idx).clamp(0, 32)] + 0.01 * kv_idx

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx % 5 != 2) | (q_idx == kv_idx)

    out, lse = call(q, k, v, *cu, score_mod=score_mod, mask_mod=mask_mod)
    loss = (out * torch.cos(torch.arange(out.numel()).view_as(out))).sum()
    grads = torch.autograd.grad(loss + lse[lse.isfinite()].sum(), leaves)
    return [x.double() for x in (out, lse, *grads)]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["alike", "other keys"])
def test_results_and_gradients_are_those_of_each_sequence(keys):
    def packed(*given, **mods):
        return varlen_attn(*given, window=(60, 0), return_lse=True, **mods)

    def apart(*given, **mods):
        return alone(*given, left=60, right=0, **mods)

    got, wanted = (results(call, keys) for call in (packed, apart))
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_a_causal_pack_without_mods():
    """Blocks inside of a sequence are full, and the mask's lists are runs in both directions."""
    given = [x.requires_grad_() for x in pack([300, 20], heads=(1, 1))[:3]]
    cu = offsets([300, 20])
    got = varlen_attn(*given, cu, cu, causal=True)
    wanted = alone(*given, cu, cu, right=0)[0]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(
        *(torch.autograd.grad(x.square().sum(), given) for x in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_new_lengths_trace_and_build_nothing(work):
    q, k, v, cu, _ = pack([200, 61])

    def lengths(first):
        cu[1] = first
        varlen_attn(q, k, v, cu, cu, causal=True)
        wide = cu.clone()
        varlen_attn(q, k, v, cu, wide, window=(30, 0), score_mod=capped)

    assert work.of(lambda: lengths(200))[0] > 0
    assert work.of(lambda: lengths(17)) == (0, 0, 0)
