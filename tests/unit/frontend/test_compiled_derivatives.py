"""Whether a compiled graph's gradients are those of its mod's expression."""

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

import flexattn
from flexattn.catalogue import softcap
from flexattn.frontend.compiled import joint
from flexattn.mods import bind
from flexattn.mods.derivative import without_stops
from flexattn.mods.graph import Captured, read_graph
from tests.compiled import as_on_a_gpu

TABLE = torch.linspace(-1, 1, 64).view(2, 32).requires_grad_()


def table_of(score, b, h, q_idx, kv_idx):
    return torch.tanh(score) * TABLE[h, kv_idx] + TABLE[h, q_idx].clamp(min=0.5)


def many(score, b, h, q_idx, kv_idx):
    x = torch.where(q_idx >= kv_idx, score, score.float().exp())
    x = x + torch.nn.functional.silu(x) / 3 ** (1 + h) + (q_idx - kv_idx).abs() // 5
    return x * 2 - x.sigmoid() + x.masked_fill(kv_idx == 0, 0.5)


def detached(score, b, h, q_idx, kv_idx):
    return score.detach() * TABLE[h, kv_idx] + score


@torch.no_grad()
def kept(score):
    return 0.015 * score


def without_grad(score, b, h, q_idx, kv_idx):
    return kept(score) * 60 * TABLE[h, kv_idx] + score


def one_key_without_grad(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx == 100, kept(score), 0.015 * score) * TABLE[h, kv_idx]


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


def rounded(score, b, h, q_idx, kv_idx):
    return Straight.apply(score) + kv_idx


class Seen(BaseException):
    """Ends a compile where Dynamo has made its graph."""


def traced(mod):
    """The graph that Dynamo makes of a score_mod, and what that captures."""

    def seen(graph, example):
        raise Seen(graph)

    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    torch._dynamo.reset()
    with pytest.raises(Seen) as found:
        torch.compile(flexattn.flex_attention, backend=seen)(q, q, q, mod)
    (graph,) = found.value.args
    (node,) = (n for n in graph.graph.nodes if "flex_attention" in str(n.target))
    captured = [n.meta["example_value"] for n in node.args[7]]
    return getattr(graph, node.args[3].target), captured


@pytest.mark.parametrize(
    ("mod", "followed"),
    [
        (table_of, True),
        (many, True),
        (softcap(20.0), True),
        (detached, False),
        (without_grad, False),
        (one_key_without_grad, False),
        (rounded, False),
    ],
)
def test_a_graph_that_keeps_something_from_autograd_is_torchs(monkeypatch, mod, followed):
    """torch's graphs lose what was computed without grad mode: the derivative would be another."""
    as_on_a_gpu(monkeypatch)
    graph, captured = traced(mod)
    index = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    given = torch.zeros((), requires_grad=True), *index, *captured
    with TransformGetItemToIndex():
        forward = make_fx(joint.marked(graph), tracing_mode="fake")(*given)
    assert joint.is_followed(forward) is followed
    assert not joint.is_followed(graph)  # which nobody marked
    # A marked graph has the mod's meaning.
    captures = [Captured(tuple(x.shape), "float32") for x in captured]
    found = read_graph(forward, "score", captures).bound(captured, ())
    assert without_stops(found).mod is bind(mod, "score").mod
    assert joint.marked(forward) is forward


def test_a_marked_graph_is_mapped_and_differentiated():
    """As backends compute a node that run it in plain torch."""
    x = torch.randn(5, requires_grad=True)
    found = torch.vmap(lambda score: joint.TRACED_OP(score * 2, True))(x)
    assert torch.equal(found, 2 * x)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.full((5,), 2.0))
