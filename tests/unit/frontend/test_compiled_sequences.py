"""varlen_attn in a graph: an op that reads cu_seqlens, or torch's node with a document mask."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

import flexattn
from flexattn.catalogue import softcap
from flexattn.frontend import varlen
from flexattn.frontend.compiled import sequences  # noqa: F401  # it defines the op
from tests.packs import KEYS, LENGTHS, offsets, pack

# Arguments, and the lengths of keys where these are others.
CASES = {
    "causal": ({"causal": True}, None),
    "window": ({"window": (9, 0), "scale": 0.5}, None),
    "other keys": ({}, KEYS),
    "sinks": ({"causal": True, "deterministic": True}, None),
}


@pytest.fixture
def on_hopper(monkeypatch):
    """Graphs are made as for Hopper; the op finds no kernel and attends by a document mask."""
    monkeypatch.setattr(varlen, "reads_packs", lambda device: True)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_the_op_is_an_eager_call(name, on_hopper):
    """With gradients through both results; other lengths in the same tensor compile nothing."""
    asked, keys = CASES[name]
    q, k, v, cu_q, cu_k = pack(keys=keys, dtype=torch.bfloat16, more=7)
    given = [q, k, v]
    if name == "sinks":
        given.append(torch.linspace(-1, 1, q.shape[1]))

    def attend(cu_q, cu_k, q, k, v, sinks=None):
        cu_k = cu_k if keys else cu_q
        out, lse = flexattn.varlen_attn(q, k, v, cu_q, cu_k, return_lse=True, sinks=sinks, **asked)
        return out.float().square().sum() + lse.clamp(min=-9).sin().sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for turn in range(2):
        if turn:
            cu_q.copy_(offsets(LENGTHS[::-1]))
            cu_k.copy_(offsets((keys or LENGTHS)[::-1]))
        leaves = [x.detach().requires_grad_() for x in given]
        found, wanted = (
            (loss := call(cu_q, cu_k, *leaves), *torch.autograd.grad(loss, leaves))
            for call in (compiled, attend)
        )
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert ops_of(graph) == [torch.ops.flexattn.attend_sequences]


def ops_of(graph):
    """The attentions that a graph has."""
    names = "flex_attention", "attend_sequences"
    return [n.target for n in graph.graph.nodes if any(x in str(n.target) for x in names)]


def test_a_call_with_mods_is_torchs_node(on_hopper):
    q, k, v, cu, _ = pack(dtype=torch.bfloat16)

    def attend(q, k, v, cu):
        return flexattn.varlen_attn(q, k, v, cu, cu, causal=True, score_mod=softcap(5.0))

    seen = EagerAndRecordGraphs()
    compiled = torch.compile(attend, fullgraph=True, backend=seen)
    with torch.no_grad():
        found, wanted = compiled(q, k, v, cu), attend(q, k, v, cu)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert ops_of(seen.graphs[0]) == [torch.ops.higher_order.flex_attention]


def test_an_op_without_a_wanted_gradient(on_hopper):
    """Of lse alone, and of nothing."""
    q, k, v, cu, _ = pack(dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = torch.ops.flexattn.attend_sequences(*leaves, None, cu, None, -1, 0, None, False)
    (wanted,) = torch.autograd.grad(
        flexattn.varlen_attn(*leaves, cu, cu, causal=True, return_lse=True)[1].sum(), q
    )
    (found,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert torch.autograd.grad((0 * lse).sum(), q, retain_graph=True)[0].abs().max() == 0
