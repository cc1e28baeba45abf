"""From a callable to an Expr: make_fx runs it once, and the graph it leaves is read back."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from flexattn.errors import SignatureError, UnsupportedError
from flexattn.mods.arrays import Array, buffer, literal_array
from flexattn.mods.asked import Asked, looked_up
from flexattn.mods.expr import VARS, Expr
from flexattn.mods.guard import Guard, Indexing, op_name
from flexattn.mods.pointwise import POINTWISE, cast
from flexattn.mods.refusal import Refusal, SourceLine, line_of, unknown
from flexattn.mods.stops import OWN_GRADIENT, stopped, without_idle_stops
from flexattn.mods.tensorwise import TENSORWISE, reads_sizes

TABLE: dict[str, Callable[..., Any]] = {**POINTWISE, **TENSORWISE}
ARGUMENTS = {"score": tuple(VARS), "mask": tuple(VARS)[1:]}
# By name: torch raises different ones for a branch, a loop and a mask, and has moved them.
_DATA_DEPENDENT = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)
RESULTS = {"score": "float32", "mask": "bool"}


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of a callable showed.

    Buffer slots in `expr` index `tensors`: the known ones first, then those that only the
    trace found. `asked`: attributes of tensors for whose present values alone it holds, in
    order. `volatile`: it holds for this call alone.
    """

    expr: Expr
    tensors: tuple[torch.Tensor, ...]
    asked: tuple[str, ...]
    volatile: bool


def trace(
    fn: Callable[..., Any],
    kind: str,
    known: Sequence[torch.Tensor],
    scalars: Mapping[int, str] | None = None,
    rebuild: Callable[[Mapping[int, torch.Tensor]], Callable[..., Any]] | None = None,
    grad: bool = False,
) -> Trace:
    """Run `fn` on traced positions and read the result as one canonical Expr.

    `known` are the captured tensors, whose order numbers the buffers. `scalars` are the slots
    and dtypes of numbers to become arguments; `rebuild` makes the callable that reads them
    from tensors instead. grad: the grad mode that it sees; only where it is on what the mod keeps
    from autograd is seen. Raises ModError or UnsupportedError.
    """
    names = ARGUMENTS[kind]
    scalars = scalars or {}
    modes: list[Indexing] = []
    device = next((t.device for t in known if t.dim()), torch.device("cpu"))

    def run(mapped: bool, *inputs: torch.Tensor) -> Any:
        replaced = dict(zip(scalars, inputs[len(names) :], strict=True))
        called = rebuild(replaced) if rebuild else fn
        called = _mapped(called) if mapped else called
        modes.append(Indexing())
        guard = Guard(_known(), stops=grad)
        with torch.set_grad_enabled(grad), _no_autocast(device), _no_hooks(), guard, modes[-1]:
            return called(*inputs[: len(names)])

    line: SourceLine | None = None
    try:
        graph = _graph(run, [*(VARS[name] for name in names), *scalars.values()], device)
        reader = Reader(graph, known)
        inputs = [Array.scalar(Expr("var", VARS[name], (), name)) for name in names]
        inputs += [Array.scalar(Expr("scalar", t, (), i), weak=True) for i, t in scalars.items()]
        try:
            result = reader.read(inputs, exact=not scalars)
        except Refusal:
            line = reader.line
            raise
        if modes[-1].hooked:
            result = stopped(result, OWN_GRADIENT)
        expr = cast(single_result(result, kind), RESULTS[kind]).at()
        expr = without_idle_stops(expr, kind)
    except Refusal as refusal:
        line = line or line_of(refusal.__traceback__)
        raise refusal.error(fn, kind, line) from None
    except Exception as error:
        if type(error).__name__ in _DATA_DEPENDENT or "_local_scalar_dense" in str(error):
            raise Asked().error(fn, kind, line_of(error.__traceback__)) from None
        if lookup := looked_up(error):
            raise lookup.error(fn, kind, line_of(error.__traceback__)) from None
        failed = Refusal(f"raised {type(error).__name__}: {error}")
        raise failed.error(fn, kind, line_of(error.__traceback__)) from error
    mode = modes[-1]
    volatile = mode.volatile or len(reader.tensors) > len(known)
    asked = mode.asked | ({"shape"} if reader.sized else set())
    return Trace(expr, tuple(reader.tensors), tuple(sorted(asked)), volatile)


def check_arity(fn: Any, kind: str) -> None:
    """Refuse a callable that cannot take the kind's positional arguments, as torch counts them."""
    names = ARGUMENTS[kind]
    if not callable(fn):
        rule = f"a {kind}_mod is a callable of ({', '.join(names)})"
        raise Refusal("is not callable", rule, "pass a function", raises=SignatureError).error(
            fn, kind, None
        )
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in required):
        if len(required) <= len(names) + 1:
            return
    elif len(required) == len(names):
        return
    taken = ", ".join(str(p) for p in required)
    raise Refusal(
        f"takes {len(required)} arguments ({taken})",
        f"a {kind}_mod takes {len(names)}: ({', '.join(names)})",
        "bind the others with functools.partial or a closure",
        raises=SignatureError,
    ).error(fn, kind)


class Reader:
    """Interprets a graph of aten operations over lazy arrays."""

    def __init__(self, graph: GraphModule, known: Sequence[torch.Tensor]) -> None:
        self.graph = graph
        self.tensors = list(known)
        self.sized = False
        self.line: SourceLine | None = None

    def read(self, inputs: list[Array], *, exact: bool) -> Any:
        """The graph's result; `exact` compares every dtype with the one that torch found."""
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
                values[node] = self._call(node.target, value_of(node.args), value_of(node.kwargs))
                if "stop" in node.meta:
                    values[node] = stopped(values[node], node.meta["stop"])
                if exact:
                    _compare(node, values[node])
        raise AssertionError("a graph without an output")

    def _constant(self, node: Node) -> Array:
        tensor = getattr(self.graph, str(node.target))
        dtype = str(tensor.dtype).removeprefix("torch.")
        if all(map(_is_lift, node.users)):
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
        if name not in TABLE:
            raise unknown(target)
        captured = [a for a in _arrays((*args, *kwargs.values())) if a.captured]
        self.sized |= bool(captured) and reads_sizes(name, args)
        result = TABLE[name](*args, **kwargs)
        if captured:
            for array in _arrays(result):
                array.captured = bool(array.shape)
        return result


def _is_lift(user: Node) -> bool:
    """Whether a node takes over a tensor that the mod itself made of numbers."""
    return user.op == "call_function" and op_name(user.target).startswith("lift_fresh")


def _arrays(values: Any) -> list[Array]:
    if isinstance(values, Array):
        return [values]
    return [a for v in values for a in _arrays(v)] if isinstance(values, (tuple, list)) else []


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


def _graph(run: Callable[..., Any], dtypes: Sequence[str], device: torch.device) -> GraphModule:
    """The graph of `run`, where an autograd Function is its forward, else its vmap rule."""
    inputs = [torch.zeros((), dtype=getattr(torch, t), device=device) for t in dtypes]

    def traced(mapped: bool) -> GraphModule:
        def called(*inputs: torch.Tensor) -> Any:
            return run(mapped, *inputs)

        made = make_fx(
            called,
            decomposition_table=decompositions(),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )
        return made(*inputs)

    try:
        return traced(mapped=False)
    except Exception as error:
        if not _in_function(error.__traceback__):
            raise
        try:
            return traced(mapped=True)
        except Exception:
            raise error from None


def _mapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as torch's eager flex_attention maps it, over one position alone."""

    def call(*inputs: torch.Tensor) -> Any:
        return torch.vmap(fn)(*(x.unsqueeze(0) for x in inputs)).squeeze(0)

    return call


def _in_function(trace: TracebackType | None) -> bool:
    """Whether an error came out of a torch.autograd.Function."""
    apply = torch.autograd.Function.apply.__code__
    while trace is not None:
        if trace.tb_frame.f_code is apply:
            return True
        trace = trace.tb_next
    return False


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Mods compute in the dtypes that they name, as where plain torch runs them."""
    where = device.type
    if torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where):
        return torch.autocast(where, enabled=False)
    return nullcontext()


def _no_hooks() -> AbstractContextManager[Any]:
    """Hides what autograd saves of a mod that is traced from hooks of the caller's."""
    autograd: Any = torch._C._autograd
    if autograd._saved_tensors_hooks_is_enabled():
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    return nullcontext()


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of every operation that the tables do not hold."""
    from torch._decomp import decomposition_table

    return {
        op: decomposed
        for op, decomposed in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and op_name(op) not in TABLE
    }


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(TABLE) | {op_name(op) for op in decompositions()}
