"""A mod that torch.compile traced is the mod that an eager call traces."""

import math
import operator

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from flexattn.errors import UnsupportedError
from flexattn.mods import bind
from flexattn.mods.expr import walk
from flexattn.mods.graph import Captured, read_graph
from flexattn.mods.refusal import Refusal
from tests.cases import CASES


def graph_of(fn, kind):
    """The graph that Inductor has of a mod, and the tensors that it takes behind positions.

    Scores and positions have the dtypes of torch's node, for queries of bfloat16.
    """
    from torch._inductor.decomposition import select_decomp_table

    positions = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    if kind == "score":
        positions.insert(0, torch.zeros((), dtype=torch.bfloat16))

    def traced(*given):
        return fn(given[0].to(torch.float32), *given[1:]) if kind == "score" else fn(*given)

    with TransformGetItemToIndex():
        made = make_fx(
            traced, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*positions)
    tensors, inputs = [], []  # a tensor is an input once, as Dynamo lifts it
    *_, last = (node for node in made.graph.nodes if node.op == "placeholder")
    for node in list(made.graph.nodes):
        if node.op != "get_attr" or any("lift_fresh" in str(user.target) for user in node.users):
            continue
        tensor = getattr(made, node.target)
        if not any(each is tensor for each in tensors):
            with made.graph.inserting_after(last):
                last = made.graph.placeholder(f"captured_{len(tensors)}")
            tensors.append(tensor)
            inputs.append(last)
        place = next(i for i, each in enumerate(tensors) if each is tensor)
        node.replace_all_uses_with(inputs[place])
        made.graph.erase_node(node)
    return made, tensors


TABLE = torch.ones(4, 3)


def told(tensor, **more):
    return Captured(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), **more)


def read(fn, kind):
    graph, tensors = graph_of(fn, kind)
    return read_graph(graph, kind, [told(x) for x in tensors])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_catalogue_is_read_as_eager_calls_read_it(case):
    """So a compiled call has the records and the compiled kernels of an eager one."""
    built = case.make(2, 4, 2, 40, 40, dtype=torch.bfloat16)
    for kind, fn in (("score", built.score_mod), ("mask", built.mask_mod)):
        if fn is None:
            continue
        graph, tensors = graph_of(fn, kind)
        got = read_graph(graph, kind, [told(x) for x in tensors]).bound(tensors, ())
        wanted = bind(fn, kind)
        assert got.mod is wanted.mod, f"{got.mod.expr}\n{wanted.mod.expr}"
        assert all(map(operator.is_, got.tensors, wanted.tensors))


def numbered(compute, captures):
    """The graph of a score_mod of captured numbers, as Dynamo lifts them: SymInts, 0-d float64."""
    graph = torch.fx.Graph()
    score, _, _, q_idx, kv_idx = (graph.placeholder(n) for n in ("s", "b", "h", "q", "kv"))
    given = [graph.placeholder(f"n{i}") for i in range(captures)]
    graph.output(compute(graph.call_function, score, q_idx, kv_idx, *given))
    return torch.fx.GraphModule({}, graph)


aten = torch.ops.aten


def test_numbers_are_arguments_whatever_their_values():
    """An int of Dynamo's is an input of the op, and so is a float; a constant would go stale."""

    def compute(call, score, q_idx, kv_idx, n, x):
        distance = call(aten.sub.Tensor, (q_idx, kv_idx))
        steps = call(aten.div.Tensor_mode, (distance, call(operator.add, (n, 1))), {
            "rounding_mode": "floor"
        })  # fmt: skip
        slope = call(aten._local_scalar_dense.default, (x,))
        return call(aten.add.Tensor, (score, call(aten.mul.Tensor, (steps, slope))))

    x = torch.tensor(1.5, dtype=torch.float64)
    mod = read_graph(numbered(compute, 2), "score", [None, told(x, on_cpu=True)])
    found = [mod.bound([x.fill_(value)], [n]) for n, value in ((4, 0.5), (9, 2.5), (9, -1.0))]
    assert len({each.mod for each in found}) == 1 and not found[0].tensors
    assert [set(each.scalars) for each in found] == [{5, 0.5}, {10, 2.5}, {10, -1.0}]
    # What fits no number that was seen gets another kernel, and the old one is found again.
    large = mod.bound([x], [2**40])
    assert large.mod is not found[0].mod and mod.bound([x], [9]).mod is found[0].mod


def test_what_python_computes_of_a_float_is_computed_on_the_host():
    """To Dynamo a changed float is a 0-d tensor: int(x) of it was refused, and torch failed."""
    nodes = {
        "trunc": lambda call, x: call(math.trunc, (x,)),
        "round": lambda call, x: call(round, (x, None)),
        "half": lambda call, x: call(operator.truediv, (x, 2)),
        "whole": lambda call, x: call(torch.sym_float, (call(math.floor, (x,)),)),
        "again": lambda call, x: call(math.trunc, (x,)),
        "least": lambda call, x: call(torch.sym_min, (x, 3)),
        "square": lambda call, x: call(operator.pow, (call(math.trunc, (x,)), 2)),
        "shifted": lambda call, x: call(operator.lshift, (call(math.ceil, (x,)), 1)),
        "digits": lambda call, x: call(round, (x, 1)),
        "root": lambda call, x: call(torch._sym_sqrt, (call(operator.abs, (x,)),)),
        "sum": lambda call, x: call(torch.sym_sum, ((call(math.floor, (x,)), 40, 2),)),
        "truth": lambda call, x: call(operator.le, (x, 1)),
    }

    def compute(call, score, q_idx, kv_idx, x):
        read = call(aten._local_scalar_dense.default, (x,))
        for node in nodes.values():
            score = call(aten.add.Tensor, (score, node(call, read)))
        return score

    x = torch.tensor(0.0, dtype=torch.float64)
    mod = read_graph(numbered(compute, 1), "score", [told(x, on_cpu=True)])
    kinds = ("int64",) * 2, ("float64",) * 3, ("int64",) * 2, ("float64",) * 2, ("int64",) * 2
    assert mod.mod.scalars == sum(kinds, ())
    for value in (-2.5, 7.75):
        x.fill_(value)
        found = mod.bound([x], [])
        wanted = {int(value), round(value), value / 2, float(math.floor(value))}
        wanted |= {min(value, 3.0), int(value) ** 2, math.ceil(value) << 1, round(value, 1)}
        wanted |= {math.sqrt(abs(value)), math.floor(value) + 42, int(value <= 1)}
        assert set(found.scalars) == wanted
    x.fill_(1e30)
    with pytest.raises(UnsupportedError, match="64 bits"):
        mod.bound([x], [])


def test_a_number_is_an_index_of_a_captured_tensor():
    """Python computes 12 % 5 of a captured int that changed, and the table is read there."""

    def compute(call, score, q_idx, kv_idx, n, table):
        place = call(operator.mod, (n, 5))
        return call(aten.add.Tensor, (score, call(aten.select.int, (table, 0, place))))

    table = torch.arange(8.0)
    mod = read_graph(numbered(compute, 2), "score", [None, told(table)])
    found = [mod.bound([table], [n]) for n in (12, 4)]
    assert found[0].mod is found[1].mod and [each.scalars for each in found] == [(2,), (4,)]
    assert [node.op for node in walk(found[0].mod.expr) if node.op == "load"] == ["load"]


def unread(call, score, q_idx, kv_idx, x):
    return call(aten.mul.Tensor, (score, call(aten._local_scalar_dense.default, (x,))))


@pytest.mark.parametrize("fn", [
    lambda s, b, h, q, kv: s + (TABLE * s).mean(1)[h],
    lambda s, b, h, q, kv: s + torch.stack((s, s * 2, s * 3)).cumsum(0)[h % 3],
], ids=["mean", "cumsum"])  # fmt: skip
def test_what_inductor_leaves_whole_is_decomposed_as_in_eager_calls(fn):
    assert read(fn, "score").mod is bind(fn, "score").mod


REFUSED = {
    "a value on the device": (unread, [Captured((), "float64")], "value of a tensor"),
    "Python's numbers": (
        lambda call, s, q, kv, n: call(aten.mul.Tensor, (s, call(math.sqrt, (n,)))),
        [None], "sqrt",
    ),
    "sizes that change": (
        lambda call, s, q, kv, x: call(aten.add.Tensor, (s, call(aten.sum.default, (x,)))),
        [Captured((5,), "float32", fixed=False)], "sizes",
    ),
    "an unknown operation": (
        lambda call, s, q, kv, x: call(aten.cummax.default, (x, 0)),
        [Captured((5,), "float32")], "cummax",
    ),
    "other inputs": (lambda call, s, q, kv, x: s, [], "6 inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    compute, captures, words = REFUSED[name]
    with pytest.raises(Refusal, match=words):
        read_graph(numbered(compute, 1), "score", captures)
