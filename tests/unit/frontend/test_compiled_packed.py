"""A layer that splits one product into q, k and v, compiled: right gradients, few copies."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

import flexattn
from bench import training_step
from flexattn.block_mask.lists import lists_pending
from flexattn.frontend.compiled import spec
from tests.compiled import as_on_a_gpu, compiling
from tests.support import inputs

B, D = 2, 16


def heads(x):
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


SPLITS = {
    "unbound": lambda x: x.unflatten(-1, (3, -1, D)).permute(2, 0, 3, 1, 4).unbind(),
    "grouped queries": lambda x: tuple(map(heads, x.split([32, 16, 16], -1))),
}


@pytest.mark.parametrize("length", [40, 0])
def test_the_op_has_the_shapes_that_it_tells_a_graph(length):
    q, k, v = (x.requires_grad_() for x in inputs(B, 2, 2, 40, 40, D, dtype=torch.float32))
    out, lse = flexattn.flex_attention(q, k, v, return_lse=True)
    given = [x.detach()[:, :, :length] for x in (q, k, v, out, lse, torch.randn_like(out))]
    text = spec.printed(spec.Spec(None, None, None, False, False, {}, True, True))
    arguments = *given, None, [], [], [], [], [], [], text, 0.25
    found = torch.ops.flexattn.attend_backward(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.flexattn.attend_backward(*arguments)
    for got, told in zip(found[:3], fake[:3], strict=True):
        assert (got.shape, got.stride()) == (told.shape, told.stride())
    assert found[3] == fake[3] == []


def layer(x, weight, split):
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
    """Neither q, k, v, nor the output; and it makes no lists of its mask."""
    block, x, mask = bench_s_block(monkeypatch)
    with compiling(monkeypatch) as found, pytest.raises(Printed):
        found.compile(block)(x, mask)
    forward, backward = codes
    assert "torch.ops.flexattn.attend_backward.default(" in backward
    for code in codes:
        assert not any(f"torch.ops.aten.{x}" in code for x in ("clone", "sort"))
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
    with compiling(monkeypatch) as found:
        (got,) = torch.autograd.grad(found.compile(model)(*given).square().mean(), leaf)
    (wanted,) = torch.autograd.grad(model(*given).square().mean(), leaf)
    assert (got - wanted).norm() < 1e-4 * wanted.norm()
