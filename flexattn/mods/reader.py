"""A graph of aten operations, read over lazy arrays: what a traced mod computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from flexattn.errors import SignatureError, UnsupportedError
from flexattn.mods.arrays import Array, broadcast, buffer, literal_array
from flexattn.mods.expr import MAX_NODES, Expr, walk
from flexattn.mods.host_numbers import Recording
from flexattn.mods.operators import is_lift, op_name, views, writes
from flexattn.mods.ops import name_of
from flexattn.mods.pointwise import POINTWISE, cast, stopped
from flexattn.mods.refusal import Refusal, SourceLine, part_written, too_long, unknown, unread
from flexattn.mods.tensorwise import REDUCTIONS, TENSORWISE, reads_sizes

TABLE: dict[str, Callable[..., Any]] = {**POINTWISE, **TENSORWISE, **REDUCTIONS}


class Reader:
    """Interprets a graph of aten operations over lazy arrays."""

    def __init__(
        self,
        graph: GraphModule,
        known: Sequence[torch.Tensor],
        recording: Recording | None = None,
    ) -> None:
        self.graph = graph
        self.recording = recording
        self.tensors = list(known)
        self.sized = False
        self.line: SourceLine | None = None

    def read(self, inputs: list[Array], *, exact: bool) -> Any:
        """The graph's result; `exact` compares every dtype with the one that torch found."""
        try:
            return self._read(inputs, exact)
        except RecursionError:
            raise Refusal(
                "builds one tensor upon another, too deeply to be read",
                "tensors that are indexed, reshaped or joined some hundred times have no end",
                "compute them outside of the mod, capture the result and index it",
                raises=UnsupportedError,
            ) from None

    def _read(self, inputs: list[Array], exact: bool) -> Any:
        values: dict[Node, Any] = {}
        arguments = iter(inputs)

        def value_of(x: Any) -> Any:
            return map_aggregate(x, lambda n: values[n] if isinstance(n, Node) else n)

        for node in self.graph.graph.nodes:
            self.line = node.meta.get("user_line")
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "get_attr":
                values[node] = self._constant(node)
            elif node.op == "output":
                return value_of(node.args[0])
            else:
                if writes(node.target):
                    _check_whole(node)
                values[node] = self._call(node.target, value_of(node.args), value_of(node.kwargs))
                if "stop" in node.meta:
                    values[node] = stopped(values[node], node.meta["stop"])
                if exact:
                    _compare(node, values[node])
        raise AssertionError("a graph without an output")

    def _constant(self, node: Node) -> Array:
        tensor = getattr(self.graph, str(node.target))
        number = self.recording.of(tensor) if self.recording else None
        if number is not None:
            return Array.scalar(number, weak=True)
        dtype = name_of(tensor.dtype)
        if all(map(is_lift, node.users)):
            return literal_array(tensor.flatten().tolist(), tensor.shape, dtype)
        slots = [slot for slot, known in enumerate(self.tensors) if known is tensor]
        if not slots:
            slots = [len(self.tensors)]
            self.tensors.append(tensor)
        return buffer(slots[0], tensor.shape, dtype)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        name = op_name(target)
        written = writes(target)
        into: Any = None
        if written:  # a whole temporary of the mod's, which later nodes read as this one's result
            # __ilshift__ is __lshift__ in place, and add_ is add.
            name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
            kwargs = dict(kwargs)
            into = kwargs.pop("out", args[0])
        if name not in TABLE:
            raise unknown(target)
        captured = [a for a in _arrays((args, kwargs)) if a.captured]
        self.sized |= bool(captured) and reads_sizes(name, args)
        try:
            result = TABLE[name](*args, **kwargs)
        except Refusal:
            raise
        except Exception as error:  # torch computes it: an option or a form that no row has
            raise unread(f"{target} in a form that it has not elsewhere") from error
        if written:
            result = broadcast(cast(result, into.dtype), into.shape)
        with suppress(Refusal):  # which is raised where a value is asked for
            for array in _arrays(result):
                if not array.shape:
                    array.at()  # now: a value of a thousand steps would recurse as deeply
        if captured:
            for array in _arrays(result):
                array.captured = bool(array.shape)
        return result


def _check_whole(write: Node) -> None:
    """Refuse a write to a tensor that another one shares its memory with."""
    into: Any = write.kwargs.get("out", write.args[0])
    if any(_is_view(each) for each in (into, *into.users)):
        raise part_written(str(write.target))


def _is_view(node: Node) -> bool:
    return hasattr(node.target, "_schema") and views(node.target) and not writes(node.target)


def _arrays(values: Any) -> list[Array]:
    return [each for each in tree_leaves(values) if isinstance(each, Array)]


def _compare(node: Node, ours: Any) -> None:
    theirs = node.meta.get("val")
    if not isinstance(ours, Array) or not isinstance(theirs, torch.Tensor):
        return
    if f"torch.{ours.dtype}" != str(theirs.dtype) or ours.shape != tuple(theirs.shape):
        raise Refusal(
            f"uses {node.target}, which gave {ours.dtype}{list(ours.shape)} here "
            f"and {theirs.dtype}{list(theirs.shape)} in torch",
            "a traced operation keeps torch's dtypes and shapes",
            "report this: it is a fault of flexattn",
            raises=UnsupportedError,
        )


def single_result(result: Any, kind: str) -> Array:
    if isinstance(result, Array) and not result.shape:
        if kind == "mask" and result.dtype != "bool":
            _refuse_mask_dtype(result.dtype)
        return result
    if isinstance(result, Array):
        raise Refusal(
            f"returns a tensor of shape {list(result.shape)}",
            "a mod returns one value for one position",
            "index or reduce it to a 0-d tensor",
            raises=SignatureError,
        )
    said = f"{result!r:.80}"
    do = "end it with `return`" if result is None else "return a tensor made of the arguments"
    if isinstance(result, (tuple, list)):
        said, do = f"a {type(result).__name__} of {len(result)}", "return one of them"
    if isinstance(result, (bool, int, float)):
        do = {
            "score": f"return torch.full_like(score, {result})",
            "mask": f"return torch.full_like(q_idx, {bool(result)}, dtype=torch.bool)",
        }[kind]
    raise Refusal(
        f"returns {said}",
        "a mod returns one 0-d tensor, as torch's flex_attention has it",
        do,
        raises=SignatureError,
    )


def check_size(expr: Expr) -> Expr:
    """The expression, if it is no larger than kernels are compiled for."""
    size = sum(1 for _ in walk(expr))
    if size > MAX_NODES:
        raise too_long(f"{size:,}")
    return expr


def _refuse_mask_dtype(dtype: str) -> NoReturn:
    """A mask that is added, 0 where a score is kept, would be taken for its opposite."""
    do = "compare with 0: `... != 0`"
    if "float" in dtype:
        do = "compare, as in `q_idx >= kv_idx`; what is added to scores belongs in a score_mod"
    raise Refusal(
        f"returns {dtype}",
        "a mask_mod returns torch.bool, True where the score is kept",
        do,
        raises=SignatureError,
    )


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of every operation that the tables do not hold.

    An operation that writes, in place or to `out=`, has the decomposition of the one that does
    not write.
    """
    from torch._decomp import decomposition_table

    found = {
        op: decomposed
        for op, decomposed in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and op_name(op) not in TABLE and not writes(op)
    }
    twins = {(op_name(op), _read(op)): decomposed for op, decomposed in found.items()}
    for name in {op_name(op) for op in found}:
        for packet in (getattr(torch.ops.aten, each, None) for each in (name, f"{name}_")):
            for op in (getattr(packet, each) for each in packet.overloads()) if packet else ():
                if writes(op) and (twin := twins.get((name, _read(op)))):
                    found[op] = _writing(op, twin)
    return found


def _read(op: Any) -> tuple[str, ...]:
    """The types of the arguments that an operator reads."""
    return tuple(str(each.type) for each in op._schema.arguments if not _is_out(each))


def _is_out(argument: Any) -> bool:
    return bool(argument.kwarg_only and argument.alias_info and argument.alias_info.is_write)


def _writing(op: Any, decomposed: Callable[..., Any]) -> Callable[..., Any]:
    out = next((each.name for each in op._schema.arguments if _is_out(each)), None)

    def write(*args: Any, **kwargs: Any) -> Any:
        into = args[0] if out is None else kwargs.pop(out)
        return into.copy_(decomposed(*args, **kwargs))

    return write


def is_known(op: Any) -> bool:
    """True if an operator is read, or decomposes to ones that are."""
    return op_name(op) in TABLE or op in decompositions()
