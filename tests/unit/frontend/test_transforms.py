"""torch's transforms around a call: refused in words, or plain torch that differentiates."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from flexattn import explain, flex_attention
from flexattn.errors import UnsupportedError
from flexattn.frontend import attention, call as calls
from flexattn.frontend.call import Call


def call(x):
    return flex_attention(x, x, x)


def plain(x):
    return torch.softmax(x @ x.mT / 4, -1) @ x


def square(*more):
    return torch.randn(*more, 1, 2, 5, 16, generator=torch.Generator().manual_seed(0))


class Layer(torch.nn.Module):
    def forward(self, x):
        return call(x)


def scaled_by(x):
    q = torch.ones(1, 2, 5, 16)
    return flex_attention(q, q, q, lambda s, b, h, q_idx, kv_idx: s * x).sum()


REFUSED = {
    "vmap": (lambda: torch.vmap(call)(square(3)), "vmap.*flatten"),
    "vmap of a gradient": (
        lambda: torch.vmap(torch.func.grad(lambda x: call(x).sum()))(square(3)), "vmap.*flatten"
    ),
    "vmap of a captured tensor": (
        lambda: torch.vmap(scaled_by)(torch.ones(3)), r"captures `x`, of shape \[\].*torch.func"
    ),
    "export": (lambda: torch.export.export(Layer(), (square(),)), "torch.export.*strict=True"),
    "make_fx": (lambda: make_fx(call)(square()), "make_fx.*no graph"),
    "make_fx of fake tensors": (
        lambda: make_fx(call, tracing_mode="fake")(square()), "make_fx.*no graph"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    """Kernels met tensors without memory: "Cannot access data pointer of Tensor"."""
    use, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=f"(?s){words}"):
        use()


def test_strict_export_gives_a_program_without_us():
    """Its node is torch's own, which plain torch runs without any tracer of ours."""
    x = square()
    program = torch.export.export(Layer(), (x,), strict=True)
    assert any("flex_attention" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), call(x))
    torch._dynamo.reset()


def test_plain_torch_has_tangents():
    x, t = square(), square() + 1
    found, wanted = (torch.func.jvp(fn, (x,), (t,)) for fn in (call, plain))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.func.grad(lambda x: call(x).sum())(x), torch.func.grad(lambda x: plain(x).sum())(x)
    )


def test_a_tangent_is_no_matter_for_kernels(monkeypatch):
    """A launch would drop it in silence: a dual tensor has the memory of any other."""
    with forward_ad.dual_level():
        x = square()
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        monkeypatch.setattr(attention, "current", lambda: type("On", (), {"interpret": True}))
        found = explain(x, dual, x)
    assert (found.route, found.why) == ("reference", "key has a tangent")
    seen = calls.make_call(x, x, x, None, None, None, False, False, None, None)
    monkeypatch.setattr(attention, "tangent", lambda named: "query")
    about = {"is_cuda": True, "dtype": x.dtype, "requires_grad": False}
    on_a_gpu = type("Tensor", (), {**about, "device": torch.device("cuda")})()
    with pytest.raises(UnsupportedError, match=r"query has a tangent.*\n.*\n.*vjp"):
        attention.route_of(seen._replace(q=on_a_gpu))


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_a_tensor_made_of_others_has_no_memory_for_a_kernel(monkeypatch, name):
    """A DTensor's address is 0, which a kernel was given to read."""
    x = square()
    given = {"q": x, "k": x, "v": x, "sinks": torch.zeros(2)}
    wrapped = given | {name: TwoTensor(given[name], given[name])}
    monkeypatch.setattr(attention, "current", lambda: SimpleNamespace(interpret=True))
    assert attention.route_of(Call(**given))[0] == "interpreter"
    with pytest.raises(UnsupportedError, match=r"(?s)TwoTensor of shape.*to_local"):
        attention.route_of(Call(**wrapped))
