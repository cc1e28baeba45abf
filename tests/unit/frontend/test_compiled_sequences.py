"""varlen_attn in a graph: its node's mods, read as kernels that read cu_seqlens have them."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention.flex_attention import and_masks

import flexattn
from flexattn.catalogue import causal, softcap
from flexattn.frontend import varlen
from flexattn.frontend.compiled.sequences import BEGINS, CU_SEQLENS, SEQUENCE_NUMBERS, in_sequences
from flexattn.frontend.packed import PACK_MARKS
from flexattn.mods import bind
from flexattn.mods.graph import Captured, read_graph
from tests.packs import KEYS, LENGTHS, offsets, pack

TABLE, HALF = torch.linspace(-1, 1, 6), torch.tensor(0.5)
LIMITS = torch.tensor([1, 50, 90, 3, 40, 30])


def by_sequence(score, b, h, q_idx, kv_idx):
    return score * TABLE[b] + (q_idx - kv_idx).clamp(0, 40) + HALF * q_idx


def odd(b, h, q_idx, kv_idx):
    return (kv_idx < LIMITS[b]) | (q_idx == kv_idx)


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 9


# Arguments, the lengths of keys, and the mask_mod that an eager call hands to the kernels.
CASES = {
    "causal": ({"causal": True, "score_mod": softcap(5.0)}, None, causal),
    "window": (
        {"window": (9, 0), "score_mod": by_sequence, "mask_mod": odd}, None,
        and_masks(causal, near, odd),
    ),
    "other keys": ({"mask_mod": odd}, KEYS, odd),
}  # fmt: skip


def mods_of(node, kinds=("score", "mask")):
    """The mods of a traced node, with the marks' values replaced, and what they capture."""
    graphs = node.args[3], node.args[4][-1]
    count = node.args[6][PACK_MARKS]
    marks = node.args[8][:count]
    assert [i for i in range(count) if len(marks[i].meta["val"]) == len(LENGTHS) + 1] == [
        i for i in CU_SEQLENS if i < count
    ]
    for kind, graph, its in zip(kinds, graphs, node.args[7:], strict=True):
        values = [x.meta["val"] for x in its]
        captures = [Captured(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in values]
        module = getattr(node.graph.owning_module, graph.target)
        numbers, begins = (
            [i for i, x in enumerate(its) if x in [marks[p] for p in places if p < count]]
            for places in (SEQUENCE_NUMBERS, BEGINS)
        )
        mod, kept = in_sequences(read_graph(module, kind, captures), numbers, begins)
        yield mod.mod, [its[i] for i in kept]


@pytest.mark.parametrize("name", CASES)
def test_the_mods_of_a_node_are_those_of_an_eager_call(name, monkeypatch):
    """And torch's own node computes the same."""
    asked, keys, mask_mod = CASES[name]
    monkeypatch.setattr(varlen, "reads_packs", lambda device: True)
    q, k, v, cu_q, cu_k = pack(keys=keys, dtype=torch.bfloat16, more=7)
    nodes = []

    def seen(graph, example):
        nodes.extend(x for x in graph.graph.nodes if "flex_attention" in str(x.target))
        return make_boxed_func(graph.forward)

    def attend(q, k, v, cu_q, cu_k):
        return flexattn.varlen_attn(q, k, v, cu_q, cu_k, **asked)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=seen))
    with torch.no_grad():
        for turn in range(2):
            if turn:
                cu_q.copy_(offsets(LENGTHS[::-1]))
                cu_k.copy_(offsets((keys or LENGTHS)[::-1]))
            got, wanted = compiled(q, k, v, cu_q, cu_k), attend(q, k, v, cu_q, cu_k)
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    (node,) = nodes
    for mod, fn in zip(mods_of(node), (asked.get("score_mod"), mask_mod), strict=True):
        (found, captured), wanted = mod, bind(fn, mod[0].kind)
        if wanted is None:
            assert found.expr.op in ("const", "var") and not captured
            continue
        assert found.expr == wanted.mod.expr
        assert len(captured) == len(wanted.tensors)
