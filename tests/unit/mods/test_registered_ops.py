"""Mods that call registered operators, in the open or inside an autograd Function."""

import pytest
import torch

import flexattn
from flexattn.errors import InputError, UnsupportedError
from flexattn.mods import bind, operators
from flexattn.mods.bind import stats
from flexattn.mods.graph import read_graph

CAP = 2.0


@pytest.fixture(autouse=True)
def meanings(monkeypatch):
    """What a test teaches is forgotten after it."""
    monkeypatch.setattr(operators, "_meanings", dict(operators._meanings))


@pytest.fixture(scope="module", autouse=True)
def library_ops():
    """attention-gym's operator, and one whose meaning nobody knows: neither can be run."""

    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the operator itself was called")

    with torch.library._scoped_library("approx", "FRAGMENT") as gyms:
        gyms.define("tanh(Tensor x) -> Tensor")
        gyms.impl("tanh", never, "CompositeExplicitAutograd")
        with torch.library._scoped_library("flexattn_tests", "FRAGMENT") as ours:
            ours.define("opaque(Tensor x) -> Tensor")
            ours.impl("opaque", never, "CompositeExplicitAutograd")
            yield


class Approximate(torch.autograd.Function):
    """As attention-gym has it: a vmap rule of its own, and no generate_vmap_rule."""

    @staticmethod
    def forward(x):
        return torch.ops.approx.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * (1 - output * output)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.tanh(x), 0


class Opaque(Approximate):
    """Its forward cannot be read, and a vmap rule is not looked at."""

    @staticmethod
    def forward(x):
        return torch.ops.flexattn_tests.opaque(x)


def capped(tanh):
    def softcap(score, b, h, q_idx, kv_idx):
        return CAP * tanh(score / CAP)

    return softcap


def plain(score, b, h, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


def by_packet(score, b, h, q_idx, kv_idx):
    return CAP * torch.ops.approx.tanh(score / CAP)


def by_overload(score, b, h, q_idx, kv_idx):
    return CAP * torch.ops.approx.tanh.default(score / CAP)


MODS = {
    "function": capped(Approximate.apply),
    "packet": by_packet,
    "overload": by_overload,
}


@pytest.mark.parametrize("name", MODS)
def test_they_mean_tanh(name):
    """attention-gym's soft-capping with approx=True was refused on every path."""
    mod = MODS[name]
    assert bind(mod, "score").mod is bind(plain, "score").mod
    before = stats().traces
    bind(mod, "score")
    assert stats().traces == before
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    got, expected = (flexattn.flex_attention(q, q, q, score_mod=each) for each in (mod, plain))
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(out.square().sum(), q)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_a_graph_of_torch_compile_means_it_too():
    """Such a mod was left to torch's lowering, which knows no operator of others."""
    graph = torch.fx.Graph()
    score, *_ = (graph.placeholder(name) for name in ("score", "b", "h", "q_idx", "kv_idx"))
    divided = graph.call_function(torch.ops.aten.div.Tensor, (score, CAP))
    bent = graph.call_function(torch.ops.approx.tanh.default, (divided,))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (bent, CAP)))
    read = read_graph(torch.fx.GraphModule({}, graph), "score", [])
    assert read.bound([], ()).mod is bind(plain, "score").mod


def test_an_operator_is_taught():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.ops.flexattn_tests.opaque(q_idx - kv_idx)

    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(UnsupportedError, match=r'register_op\("flexattn_tests::opaque", '):
        flexattn.flex_attention(q, q, q, score_mod=mod)
    flexattn.register_op("flexattn_tests::opaque", lambda x: torch.where(x > 2, -1.0, x * 0.5))

    def meant(score, b, h, q_idx, kv_idx):
        return score + torch.where(q_idx - kv_idx > 2, -1.0, (q_idx - kv_idx) * 0.5)

    assert bind(mod, "score").mod is bind(meant, "score").mod
    got, expected = (flexattn.flex_attention(q, q, q, score_mod=each) for each in (mod, meant))
    torch.testing.assert_close(got, expected)


def test_what_nothing_can_read_is_refused_by_its_forward():
    with pytest.raises(UnsupportedError, match=r"(?s)opaque\.default.*register_op"):
        bind(capped(Opaque.apply), "score")


@pytest.mark.parametrize(
    ("name", "meaning", "words"),
    [
        ("tanh", torch.tanh, "namespace::name"),
        ("approx::tanh.default", torch.tanh, "namespace::name"),
        (3, torch.tanh, "namespace::name"),
        ("aten::tanh", torch.tanh, "torch's own"),
        ("approx::tanh", 3, "function of its arguments"),
    ],
)
def test_what_cannot_be_taught(name, meaning, words):
    with pytest.raises(InputError, match=words):
        flexattn.register_op(name, meaning)
