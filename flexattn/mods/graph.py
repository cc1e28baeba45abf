"""A mod that torch.compile traced: its graph of ATen operations, read as `trace` reads its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from flexattn.mods.arrays import Array, buffer
from flexattn.mods.bind import variant_of
from flexattn.mods.derivative import without_idle_stops
from flexattn.mods.expr import RESULTS, VARS, Buffer, Expr, Mod
from flexattn.mods.operators import meaning_of, op_name
from flexattn.mods.pointwise import cast
from flexattn.mods.reader import (
    TABLE,
    Reader,
    check_size,
    decompositions,
    functional,
    single_result,
)
from flexattn.mods.refusal import Refusal
from flexattn.mods.site import Bound, Variant, interned
from flexattn.mods.trace import ARGUMENTS, Trace

# What Dynamo computes of integers that it does not know yet.
_ON_INTEGERS: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.neg: "neg",
}
# How Dynamo passes a Python float: it reads a float64 without dimensions, on the CPU.
_READ = "_local_scalar_dense"


class Captured(NamedTuple):
    """A tensor that a graph takes behind its positions; an integer has no dtype.

    shape: as expected. fixed: whether every call has it so. on_cpu: whether the host reads it
    without waiting for a device.
    """

    shape: tuple[int, ...]
    dtype: str
    fixed: bool = True
    on_cpu: bool = False


@dataclass(slots=True)
class GraphMod:
    """A graph's mod, whose slots are numbered as the graph's captured tensors and its numbers.

    numbers: where each comes from: ("tensor", i) of the captured tensors, ("integer", i) of the
    integers. variants: what calls made of it so far, by the range of its numbers.
    """

    mod: Mod
    numbers: tuple[tuple[str, int], ...]
    variants: list[Variant] = field(default_factory=list)

    def bound(self, tensors: Sequence[Tensor], integers: Sequence[int]) -> Bound:
        """The Mod that kernels know, with the values of its slots, as `bind` gives it."""
        scalars = [
            tensors[i].item() if kind == "tensor" else integers[i] for kind, i in self.numbers
        ]
        for variant in self.variants:
            found = variant.bound(tensors, scalars)
            if found is not None:
                return found
        read = Trace(self.mod.expr, tuple(tensors), (), "")
        variant = variant_of(self.mod.kind, read, scalars, self.variants)
        self.variants.append(variant)
        found = variant.bound(tensors, scalars)
        assert found is not None
        return found


def read_graph(graph: GraphModule, kind: str, captures: Sequence[Captured | None]) -> GraphMod:
    """The mod of a graph with placeholders for its positions, then for captures.

    captures: None for an integer. Raises Refusal for what no kernel computes, and for sizes of
    captured tensors that a later call may change.
    """
    names = ARGUMENTS[kind]
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(nodes) != len(names) + len(captures):
        raise Refusal(f"has {len(nodes)} inputs, {len(names) + len(captures)} are known")
    arrays = [Array.scalar(Expr("var", VARS[name], (), name)) for name in names]
    buffers: list[Buffer] = []
    scalars: list[str] = []
    numbers: list[tuple[str, int]] = []
    integers = 0
    for node, captured in zip(nodes[len(names) :], captures, strict=True):
        if captured is None:
            arrays.append(_number("int64", scalars))
            numbers.append(("integer", integers))
            integers += 1
            continue
        if _is_number(node, captured):
            arrays.append(_number(captured.dtype, scalars))
            numbers.append(("tensor", len(buffers)))
        else:
            arrays.append(buffer(len(buffers), captured.shape, captured.dtype))
        buffers.append(Buffer(captured.dtype, len(captured.shape)))
    reader = _GraphReader(graph, ())
    result = single_result(reader.read(arrays, exact=False), kind)
    expr = check_size(without_idle_stops(cast(result, RESULTS[kind]).at(), kind))
    if reader.tensors:
        raise Refusal("holds a tensor that is no input of its graph")
    if reader.sized and not all(each is None or each.fixed for each in captures):
        raise Refusal("asks for sizes of a captured tensor that differ from call to call")
    return GraphMod(interned(kind, expr, tuple(buffers), tuple(scalars)), tuple(numbers))


def _number(dtype: str, scalars: list[str]) -> Array:
    scalars.append(dtype)
    return Array.scalar(Expr("scalar", dtype, (), len(scalars) - 1), weak=True)


def _is_number(node: Node, captured: Captured) -> bool:
    """Whether a captured tensor is a Python number in disguise: nothing but its value is read."""
    if captured.shape or not captured.on_cpu or captured.dtype not in ("float64", "int64"):
        return False
    return bool(node.users) and all(_reads_value(user) for user in node.users)


def _reads_value(node: Node) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") == "aten"
        and (op_name(node.target) == _READ)
    )


class _GraphReader(Reader):
    """Reads what Dynamo leaves beside ATen's operations, too."""

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _ON_INTEGERS:
            compute: Callable[..., Any] = TABLE[_ON_INTEGERS[target]]
            return compute(*args)
        if not hasattr(target, "namespace"):
            if target is operator.getitem:
                return args[0][args[1]]
            raise Refusal(f"uses {getattr(target, '__name__', target)} of Python's numbers")
        if op_name(target) == _READ:
            if not isinstance(args[0], Array) or not args[0].weak:
                raise Refusal("reads the value of a tensor")
            return args[0]
        meaning = meaning_of(target)
        if meaning is not None:
            return self._meant(meaning, args, kwargs)
        return super()._call(target, args, kwargs)

    def _meant(
        self, meaning: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a registered operator computes of these arrays, by its meaning's own graph."""
        arrays = [each for each in args if isinstance(each, Array)]

        def called(*tensors: Tensor) -> Any:
            given = iter(tensors)
            return meaning(
                *(next(given) if isinstance(each, Array) else each for each in args), **kwargs
            )

        like = [torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in arrays]
        graph = make_fx(called, decompositions(), tracing_mode="fake")(*like)
        graph = functional(graph, like, decompositions())
        return _GraphReader(graph, ()).read(arrays, exact=False)
