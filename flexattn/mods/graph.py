"""A mod that torch.compile traced: its graph of ATen operations, read as `trace` reads its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flexattn.errors import UnsupportedError
from flexattn.mods.arrays import Array, buffer
from flexattn.mods.bind import variant_of
from flexattn.mods.derivative import without_idle_stops
from flexattn.mods.expr import RESULTS, VARS, Buffer, Expr, Mod, integer
from flexattn.mods.host_numbers import MATHS, TEXTS, host_values, program
from flexattn.mods.operators import meaning_of
from flexattn.mods.ops import dtype_of
from flexattn.mods.pointwise import cast
from flexattn.mods.reader import Reader, check_size, decompositions, single_result
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import applied
from flexattn.mods.site import Bound, Variant, interned
from flexattn.mods.trace import ARGUMENTS, Trace

# Operations on Python numbers that Dynamo leaves in a graph, as texts for the host.
_OF_NUMBERS: dict[Any, str] = TEXTS | {
    torch.sym_int: "trunc({})",
    torch.sym_float: "float({})",
    torch.sym_min: "min({}, {})",
    torch.sym_max: "max({}, {})",
    torch.sym_not: "(not {})",
    **{getattr(torch, f"_sym_{name}"): f"{name}({{}})" for name in MATHS},
}
_KINDS = {int: "int64", bool: "bool", float: "float64"}
# Of which every operation above is defined, and of the type that it has of all others.
_SAMPLES = {"int64": "1", "bool": "True", "float64": "1.0"}
# How Dynamo passes a Python float: it reads a float64 without dimensions, on the CPU.
_READ = torch.ops.aten._local_scalar_dense.default


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

    numbers: the texts of the numbers, which the host computes of captured numbers `s`. sources:
    where each of these comes from: ("tensor", i) of the captured tensors, ("integer", i) of the
    integers. variants: what calls made of it so far, by the range of its numbers.
    """

    mod: Mod
    numbers: tuple[str, ...]
    sources: tuple[tuple[str, int], ...]
    variants: list[Variant] = field(default_factory=list)

    def bound(self, tensors: Sequence[Tensor], integers: Sequence[int]) -> Bound:
        """The Mod that kernels know, with the values of its slots, as `bind` gives it.

        Raises UnsupportedError if Python computes no number of 64 bits.
        """
        captured = [
            tensors[i].item() if kind == "tensor" else integers[i] for kind, i in self.sources
        ]
        kinds = tuple(float if each == "float64" else int for each in self.mod.scalars)
        scalars = host_values(self.numbers, kinds, captured)
        if scalars is None:
            raise UnsupportedError(
                f"a mod under torch.compile computes {', '.join(self.numbers)} of s = {captured}",
                "each is an integer of 64 bits or a float, of one type in all calls of a graph",
                "compute it before the call, and let the mod capture the result",
            )
        for variant in self.variants:
            found = variant.bound(tensors, scalars)
            if found is not None:
                return found
        read = Trace(self.mod.expr, tuple(tensors), False, "")
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
    inputs: list[Any] = [Array.scalar(Expr("var", VARS[name], (), name)) for name in names]
    buffers: list[Buffer] = []
    sources: list[tuple[str, int]] = []
    integers = 0
    for node, captured in zip(nodes[len(names) :], captures, strict=True):
        if captured is None:
            inputs.append(_Number(f"s[{len(sources)}]", "int64"))
            sources.append(("integer", integers))
            integers += 1
            continue
        if _is_number(node, captured):
            inputs.append(_Number(f"s[{len(sources)}]", captured.dtype))
            sources.append(("tensor", len(buffers)))
        else:
            inputs.append(buffer(len(buffers), captured.shape, captured.dtype))
        buffers.append(Buffer(captured.dtype, len(captured.shape)))
    reader = _GraphReader(graph, ())
    result = single_result(reader.read(inputs, exact=False), kind)
    expr = check_size(without_idle_stops(cast(result, RESULTS[kind]).at(), kind))
    if reader.tensors:
        raise Refusal("holds a tensor that is no input of its graph")
    if reader.sized and not all(each is None or each.fixed for each in captures):
        raise Refusal("asks for sizes of a captured tensor that differ from call to call")
    numbers = reader.numbers
    mod = interned(kind, expr, tuple(buffers), tuple(each.dtype for each in numbers))
    return GraphMod(mod, tuple(each.text for each in numbers), tuple(sources))


def _is_number(node: Node, captured: Captured) -> bool:
    """True if a captured tensor is a Python number in the graph: only its value is read."""
    if captured.shape or not captured.on_cpu or captured.dtype not in ("float64", "int64"):
        return False
    return bool(node.users) and all(user.target is _READ for user in node.users)


@dataclass(frozen=True, slots=True)
class _Number:
    """A Python number in a graph: the text that the host computes; int64, float64 or bool."""

    text: str
    dtype: str


def _computed(function: Any, operands: Sequence[_Number | float]) -> _Number:
    """The number that an operation of `_OF_NUMBERS` makes; raises Refusal for its other forms."""
    pattern = _OF_NUMBERS[function]
    if function is round and len(operands) == 2:
        pattern = "round({}, {})"
    if pattern.count("{}") != len(operands):
        raise Refusal(f"calls {function.__name__} with {len(operands)} of Python's numbers")
    shown = [x.text if isinstance(x, _Number) else f"({x!r})" for x in operands]
    kinds = [x.dtype if isinstance(x, _Number) else _KINDS[type(x)] for x in operands]
    # The least of an integer and a float is a float to Dynamo, whichever it is.
    mixed = len({*kinds}) == 2 and function in (torch.sym_min, torch.sym_max)
    pattern = f"float({pattern})" if mixed else pattern
    (sample,) = program((pattern.format(*map(_SAMPLES.get, kinds)),))(())
    return _Number(pattern.format(*shown), _KINDS[type(sample)])


class _GraphReader(Reader):
    """Reads what Dynamo leaves beside ATen's operations, too."""

    def __init__(self, graph: GraphModule, known: Sequence[Tensor]) -> None:
        super().__init__(graph, known)
        self.numbers: list[_Number] = []

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.sym_sum:
            return reduce(lambda x, y: _computed(operator.add, (x, y)), args[0])
        if any(isinstance(each, _Number) for each in args) and target in _OF_NUMBERS:
            return _computed(target, [each for each in args if each is not None])
        if target is not operator.getitem and not hasattr(target, "namespace"):
            raise Refusal(f"uses {getattr(target, '__name__', target)} of Python's numbers")
        if target is _READ:
            if not isinstance(args[0], _Number):
                raise Refusal("reads the value of a tensor")
            return args[0]
        args, kwargs = tree_map_only(_Number, self._scalar, (args, kwargs))
        meaning = meaning_of(target) or decompositions().get(target)
        if meaning is not None:
            return self._meant(meaning, args, kwargs)
        return super()._call(target, args, kwargs)

    def _scalar(self, number: _Number) -> Array:
        """The scalar of the kernel that a number becomes where it meets a tensor."""
        if number.dtype == "bool":
            whole = self._scalar(_Number(f"trunc({number.text})", "int64")).at()
            return Array.scalar(applied("ne", whole, integer(0)), weak=True)
        if number not in self.numbers:
            self.numbers.append(number)
        slot = self.numbers.index(number)
        return Array.scalar(Expr("scalar", number.dtype, (), slot), weak=True)

    def _meant(
        self, meaning: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a function of tensors for these arrays, by a graph of its own."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, each in enumerate(leaves) if isinstance(each, Array)]
        arrays = [leaves[place] for place in places]

        def called(*tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(i, x) for i, x in enumerate(leaves)], spec)
            return meaning(*args, **kwargs)

        like = [torch.zeros(each.shape, dtype=dtype_of(each.dtype)) for each in arrays]
        graph = make_fx(called, decompositions(), tracing_mode="fake")(*like)
        reader = _GraphReader(graph, ())
        found = reader.read(arrays, exact=False)
        self.sized |= reader.sized
        return found
