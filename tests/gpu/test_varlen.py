"""varlen_attn() on a GPU: new lengths without a wait, in captured and in compiled graphs."""

import pytest
import torch

from flexattn import varlen_attn
from flexattn.settings import override
from tests.packs import KEYS, LENGTHS, assert_right, offsets, pack

OTHER = [100, 0, 61, 0, 50, 50]


def given(keys=None, lengths=LENGTHS):
    made = pack(lengths, keys, widths=(64, 64), dtype=torch.bfloat16)
    return [x.cuda() for x in made[:3]], made[3].cuda(), made[4].cuda()


@pytest.mark.parametrize("keys", [None, KEYS], ids=["alike", "other keys"])
def test_a_causal_pack(keys):
    tensors, cu_q, cu_k = given(keys)
    cu_k = cu_q if keys is None else cu_k
    got = varlen_attn(*tensors, cu_q, cu_k, causal=True, return_lse=True)
    assert_right(got, *tensors, cu_q, cu_k, right=0)


def test_a_new_pack_waits_for_nothing():
    tensors, cu, _ = given()
    leaves = [x.requires_grad_() for x in tensors]

    def step():
        out = varlen_attn(*leaves, cu, cu, causal=True)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    for lengths in (LENGTHS, OTHER):
        cu.copy_(offsets(lengths))
        step()
    new = offsets([261, 0, 0, 0, 0, 0]).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with override(check=False):  # a check of numbers waits for them
            cu.copy_(new)
            found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(x.isfinite().all() for x in found)


def test_a_captured_graph_reads_new_lengths():
    tensors, cu, _ = given()
    varlen_attn(*tensors, cu, cu, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_attn(*tensors, cu, cu, causal=True)
    for lengths in (LENGTHS, OTHER):
        cu.copy_(offsets(lengths))
        graph.replay()
        assert_right((out, None), *tensors, cu, cu, right=0)


def test_a_compiled_graph_with_gradients():
    tensors, cu, _ = given()
    leaves = [x.requires_grad_() for x in tensors]
    bias = torch.linspace(-1, 1, 4 * 41, device="cuda").view(4, 41).requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, (q_idx - kv_idx).clamp(0, 40)]

    def attend(q, k, v, cu):
        return varlen_attn(q, k, v, cu, cu, causal=True, score_mod=score_mod)

    compiled = torch.compile(attend, fullgraph=True)
    for lengths in (LENGTHS, OTHER):
        cu.copy_(offsets(lengths))
        found = [
            torch.autograd.grad(call(*leaves, cu).float().square().sum(), [*leaves, bias])
            for call in (compiled, attend)
        ]
        torch.testing.assert_close(*found, rtol=2e-2, atol=5e-2)
