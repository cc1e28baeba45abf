"""functional(): a mod's graph without writes; what it wrote to its own temporaries is a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from flexattn.mods.refusal import Refusal, unread

_PASSES = 3


def writes(op: Any) -> bool:
    """Whether an operator changes elements; squeeze_ changes but the shape."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.is_mutable and op.overloadpacket.__name__ != "squeeze_"


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of an operator writes to."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(each, Tensor):
                    yield each


def functional(
    graph: GraphModule, inputs: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """The same graph by torch's functionalization, which keeps views; as it is without a write.

    inputs: as make_fx was given. table: torch's decompositions. Nothing but tensors that the
    graph makes is written to. Raises Refusal for a write that torch does not follow.
    """
    # What is written to may have a decomposition that writes itself.
    for _ in range(_PASSES):
        if any(writes(node.target) for node in graph.graph.nodes):
            graph = _functional(graph, inputs, table)
    return graph


def _functional(
    graph: GraphModule, inputs: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    # What is no functional tensor could not be the source of one that is written to.
    names = [
        str(node.target)
        for node in graph.graph.nodes
        if node.op == "get_attr" and not all(map(is_lift, node.users))
    ]

    def run(*given: Tensor) -> Any:
        constants = dict(zip(names, given[len(inputs) :], strict=True))
        return _Again(graph, constants).run(*given[: len(inputs)])

    def called(*given: Tensor) -> Any:
        constants = [getattr(graph, name) for name in names]
        return functionalize(run, remove="mutations")(*given, *constants)

    made = make_fx(called, dict(table), tracing_mode="fake", _allow_non_fake_inputs=True)
    return made(*inputs)


def is_lift(user: Node) -> bool:
    """Whether a node copies a tensor that the mod itself made of numbers."""
    packet = getattr(user.target, "overloadpacket", None)
    return packet is not None and packet.__name__.startswith("lift_fresh")


class _Again(Interpreter):
    """Runs a graph; what is traced of a node gets the node's marks."""

    def __init__(self, graph: GraphModule, constants: Mapping[str, Tensor]) -> None:
        super().__init__(graph)
        self.constants = constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A captured tensor as functionalize was given it."""
        return self.constants.get(target, super().get_attr(target, args, kwargs))

    def run_node(self, node: Node) -> Any:
        """What the node gives."""
        before, line = len(nodes_of()), node.meta.get("user_line")
        marks = {str(key): node.meta[key] for key in ("user_line", "stop") if key in node.meta}
        try:
            result = super().run_node(node)
        except Refusal:
            raise
        except Exception as error:
            refusal = unread(f"{node.target} where a mod writes to a tensor")
            refusal.line = line
            raise refusal from error
        mark(before, marks)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives; torch's functionalization knows no views and writes of prims."""
        if getattr(target, "namespace", "") == "prims":
            target = target.impl_aten
        return super().call_function(target, args, kwargs)


def nodes_of() -> Any:
    """The nodes of the graph that make_fx builds at this moment."""
    proxies = get_proxy_mode()
    return proxies.tracer.graph.nodes if proxies else ()


def mark(before: int, marks: Mapping[str, Any]) -> None:
    """Leave marks on what a graph got since it had `before` nodes.

    user_line: of the mod. stop: what keeps a value from autograd.
    """
    nodes = nodes_of()
    for node, _ in zip(reversed(nodes), range(len(nodes) - before), strict=False):
        node.meta |= marks
