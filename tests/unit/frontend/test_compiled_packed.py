"""Gradients of q, k and v that a graph puts side by side are written there by the kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flexattn
from bench import training_step
from flexattn.block_mask.lists import lists_pending
from flexattn.frontend.compiled import op, spec
from flexattn.frontend.compiled.packed import packed_gradients
from tests.compiled import as_on_a_gpu, compiling
from tests.support import inputs

B, N, D = 2, 5, 16


def heads(x):
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def unpacked(x):
    return x.unflatten(-1, (3, -1, D)).permute(2, 0, 3, 1, 4)


def selected(x):
    return x[0], x[1], x[2]


def reordered(k, v, q):
    return q, k, v


SPLITS = {
    "selected": lambda x: selected(unpacked(x)),
    "unbound": lambda x: unpacked(x).unbind(),
    "in chunks": lambda x: tuple(map(heads, x.chunk(3, -1))),
    "grouped queries": lambda x: tuple(map(heads, x.split([32, 16, 16], -1))),
    "key first": lambda x: reordered(*map(heads, x.chunk(3, -1))),
    "heads by three": lambda x: x.unflatten(-1, (-1, 3, D)).permute(3, 0, 2, 1, 4).unbind(),
    "rows by three": lambda x: x.unflatten(1, (-1, 3)).unflatten(-1, (-1, D)).permute(
        2, 0, 3, 1, 4
    ).unbind(),
    "columns apart": lambda x: x.unflatten(-1, (-1, D, 3)).permute(4, 0, 2, 1, 3).unbind(),
    "summed twice": lambda x: selected(unpacked(x) + unpacked(x)),
}  # fmt: skip
# What is put side by side is turned, or added to itself, before the product reads it.
FURTHER = ("columns apart", "summed twice")


def traced(split, width, length=N):
    """The graph of a split's backward, its node of three gradients, and what they are of."""
    base = torch.randn(B, length, width)
    parts = split(base)
    given = [torch.randn(B, x.shape[2], *x.shape[1::2]).transpose(1, 2) for x in parts]

    def backward(base, *grads):
        base.requires_grad_()
        found = torch._foreach_neg(grads)
        (whole,) = torch.autograd.grad(split(base), base, found)
        return whole.flatten(0, 1) @ torch.ones(width, 1), whole

    graph = make_fx(backward, select_decomp_table(), "fake")(base, *given)
    # As Inductor passes over it: the product alone is a result.
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ((output.args[0][0],),)
    graph.graph.eliminate_dead_code()
    (node,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten._foreach_neg.default
    )
    return graph, node, base, given


@pytest.mark.parametrize("name", SPLITS)
def test_a_tensor_of_all_gradients_is_found(name):
    """Each gradient's place in it is where the split has its tensor."""
    length = 3 * N if name == "rows by three" else N
    graph, node, base, given = traced(SPLITS[name], 64 if "grouped" in name else 96, length)
    found = packed_gradients(node)
    assert found is not None
    memory = torch.full((sum(x.numel() for x in given),), float("nan"))
    for i, x in enumerate(given):
        offset, *strides = found.places[4 * i : 4 * i + 4]
        memory.as_strided(x.shape, (*strides, 1), offset).copy_(-x)
    wanted = {}

    class Watched(torch.fx.Interpreter):
        def run_node(self, n):
            wanted[n] = super().run_node(n)
            return wanted[n]

    Watched(graph).run(base, *given)
    value = wanted[found.node]
    assert torch.equal(memory.view(value.shape), value)
    # Else the product reads it, through views alone.
    assert name in FURTHER or {use.target for use in found.node.users} <= {
        torch.ops.aten.mm.default, torch.ops.aten.view.default
    }  # fmt: skip


OTHERS = {
    "turned": lambda x: [heads(part) * 2 for part in x.chunk(3, -1)],
    "two of three": lambda x: [*map(heads, x.chunk(3, -1)[:2]), heads(x.chunk(3, -1)[0])],
    "a gap": lambda x: tuple(map(heads, x.split([16, 16, 16, 48], -1)[:3])),
    "through a sine": lambda x: [heads(part.sin()) for part in x.chunk(3, -1)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_copy_stays(name):
    _, node, _, _ = traced(OTHERS[name], 96)
    assert packed_gradients(node) is None


def given(dtype=torch.float32):
    q, k, v = (x.requires_grad_() for x in inputs(B, 2, 2, 40, 40, D, dtype=dtype))
    out, lse = flexattn.flex_attention(q, k, v, return_lse=True)
    dout = torch.randn_like(out)
    text = spec.printed(spec.Spec(None, None, None, False, False, {}, True, True))
    q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
    return q, k, v, out, lse, dout, None, [], [], [], [], [], [], text, 0.25


def places(length):
    whole = torch.empty(B, length, 3, 2, D).permute(2, 0, 3, 1, 4)
    return [n for x in whole for n in (x.storage_offset(), *x.stride()[:3])]


@pytest.mark.parametrize("length", [40, 0])
def test_the_op_fills_the_tensor(length):
    arguments = given()
    if not length:
        arguments = (*(x[:, :, :0] for x in arguments[:6]), *arguments[6:])
    apart = torch.ops.flexattn.attend_backward(*arguments)
    found = torch.ops.flexattn.attend_backward_packed(*arguments, places(length))
    whole = found[0].view(B, length, 3, 2, D).permute(2, 0, 3, 1, 4)
    for got, wanted in zip(whole, apart, strict=False):
        assert torch.equal(got, wanted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.flexattn.attend_backward_packed(*arguments, places(length))
    assert (fake[0].shape, fake[0].stride()) == (found[0].shape, found[0].stride())
    assert fake[1] == found[1] == []


def layer(x, weight, split=unpacked):
    q, k, v = split(x @ weight)
    return flexattn.flex_attention(q, k, v, enable_gqa=True).square().mean()


class Printed(BaseException):
    """Ends a compile where code is printed."""


@pytest.fixture
def codes(monkeypatch):
    """What is printed of a forward and of its backward, which then ends the compile."""
    as_on_a_gpu(monkeypatch)
    found = []

    def printed(graph):
        found.append(graph.codegen()[0].value)
        if graph.is_backward:
            raise Printed
        return SimpleNamespace(call=lambda *_: None, runner=None, __file__="")

    monkeypatch.setattr(GraphLowering, "compile_to_module", printed)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        yield found


def assert_no_copy(code):
    """What follows the op in a backward is the product's."""
    _, after = code.split("torch.ops.flexattn.attend_backward_packed.default(")
    between, product, _ = after.partition("extern_kernels.mm(")
    assert product and not any(x in between for x in ("cpp_fused", "torch.ops.aten", "return ("))


@pytest.mark.parametrize("name", ["unbound", "in chunks", "grouped queries"])
def test_a_compiled_backward_copies_no_gradient(monkeypatch, codes, name):
    split, width = SPLITS[name], 64 if "grouped" in name else 96
    x, weight = torch.randn(B, 40, 32), torch.randn(32, width, requires_grad=True)
    with compiling(monkeypatch) as found, pytest.raises(Printed):
        found.compile(layer)(x, weight, split)
    assert_no_copy(codes[1])
    parts = split(torch.empty(B, 40, width))
    places = [n for part in parts for n in (part.storage_offset(), *part.stride()[:3])]
    assert f", {places})" in codes[1]


def bench_s_block(monkeypatch):
    """The block of bench.training_step in a small size, its input, and its mask."""
    monkeypatch.setattr(training_step, "WIDTH", 64)
    monkeypatch.setattr(training_step, "HEADS", 4)
    documents = SimpleNamespace(batch=B, length=40, mean=16, packed=False)
    attend, mask = training_step.attends(documents, "cpu")[training_step.OURS]()
    torch.manual_seed(0)
    block = training_step.GPT(1, attend).blocks[0]
    return block, torch.randn(B, 40, 64, requires_grad=True), mask


def test_a_block_of_the_bench_copies_nothing_for_its_attention(monkeypatch, codes):
    """Neither q, k, v, nor the output, nor a gradient; and it makes no lists of its mask."""
    block, x, mask = bench_s_block(monkeypatch)
    with compiling(monkeypatch) as found, pytest.raises(Printed):
        found.compile(block)(x, mask)
    forward, backward = codes
    assert_no_copy(backward)
    for code in codes:
        assert not any(f"torch.ops.aten.{x}" in code for x in ("clone", "cat", "sort"))
    before, after = forward.split("torch.ops.flexattn.attend.default(")
    assert lists_pending(mask) and before.count("extern_kernels.mm(") == 1
    for given, offset in zip(after.split(", reinterpret_tensor("), (0, 64, 128), strict=False):
        assert f"(2, 4, 40, 16), (7680, 16, 192, 1), {offset})" in given


@pytest.mark.long
@pytest.mark.parametrize("case", ["unbound", "grouped queries", "block"])
def test_a_compiled_backward_is_right(monkeypatch, case):
    as_on_a_gpu(monkeypatch)
    width = 64 if "grouped" in case else 96
    model, leaf = layer, (0.1 * torch.randn(32, width)).requires_grad_()
    given = torch.randn(B, 40, 32), leaf, SPLITS.get(case)
    if case == "block":
        model, *given = bench_s_block(monkeypatch)
        leaf = model.qkv.weight
    called, run = [], op.attend_backward
    monkeypatch.setattr(
        op, "attend_backward", lambda *given: called.append(given[-1]) or run(*given)
    )
    with compiling(monkeypatch) as found:
        (got,) = torch.autograd.grad(found.compile(model)(*given).square().mean(), leaf)
    (wanted,) = torch.autograd.grad(model(*given).square().mean(), leaf)
    assert (got - wanted).norm() < 1e-4 * wanted.norm() and len(called[0]) == 3
