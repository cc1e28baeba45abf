"""A callable run once by make_fx, its graph read back; captured numbers lifted into arguments."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from flexattn.errors import FlexAttnError, SignatureError, UnsupportedError
from flexattn.mods.arrays import Array
from flexattn.mods.derivative import without_idle_stops
from flexattn.mods.expr import RESULTS, VARS, Expr
from flexattn.mods.host_numbers import HostNumber, Recording, program, scalars_of
from flexattn.mods.identity import Identity, Path, identify
from flexattn.mods.modes import DispatchMode, FunctionMode
from flexattn.mods.ops import OWN_GRADIENT
from flexattn.mods.pointwise import cast, stopped
from flexattn.mods.reader import (
    Reader,
    check_size,
    decompositions,
    is_known,
    single_result,
)
from flexattn.mods.refusal import Asked, Refusal, SourceLine, line_of, looked_up, unread
from flexattn.mods.simplify import plug
from flexattn.util.locks import awaited

ARGUMENTS = {"score": tuple(VARS), "mask": tuple(VARS)[1:]}
# By name: torch raises different ones for a branch, a loop and a mask, and has moved them.
_DATA_DEPENDENT = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)
_COMPILED = Refusal(
    "calls what torch.compile made",
    "a mod is traced itself, and becomes part of a kernel",
    "pass the function that was compiled; torch.compile may be around flex_attention",
    raises=UnsupportedError,
)
# One run of torch's tracer at a time, at most as long as `DispatchMode` lets a mod be: it patches
# what all threads share, and imports much the first time. What is traced is read without it.
_TRACER = awaited(threading.RLock())


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of one run of a callable.

    Buffer slots in `expr` index `tensors`: the known ones first, then those that only the
    trace found. `sized`: it holds for the present sizes of tensors alone. `volatile`: why it holds
    for this call alone; empty where it holds for others. `texts`: what the host computes for each
    slot of its scalars, which are the callable's own where there are none. `graph`: what it was
    read from, with numbers at the precision that Python gave them.
    """

    expr: Expr
    tensors: tuple[torch.Tensor, ...]
    sized: bool
    volatile: str
    texts: tuple[str, ...] = ()
    graph: GraphModule | None = None


def trace(
    fn: Callable[..., Any],
    kind: str,
    known: Sequence[torch.Tensor],
    recording: Recording | None = None,
    grad: bool = False,
) -> Trace:
    """Run `fn` on traced positions and read the result as one canonical Expr.

    `known` are the captured tensors, whose order numbers the buffers. recording: what notes the
    uses of the host numbers that `fn` reads, whose slots are the scalars of the Expr. grad: the
    grad mode that it sees; only where it is on what the mod keeps from autograd is seen. Raises
    ModError or UnsupportedError.
    """
    names = ARGUMENTS[kind]
    dispatch, function = DispatchMode(is_known, ()), FunctionMode()
    device = next((t.device for t in known if t.dim()), torch.device("cpu"))

    if recording is not None:
        recording.device = device

    def run(*inputs: torch.Tensor) -> Any:
        nonlocal dispatch, function
        dispatch, function = DispatchMode(is_known, inputs, stops=grad), FunctionMode()
        with (
            torch.set_grad_enabled(grad), _no_autocast(device), _no_hooks(), dispatch, function,
        ):  # fmt: skip
            return fn(*inputs)

    line: SourceLine | None = None
    try:
        with _unsaid():
            graph = _graph(run, [VARS[name] for name in names], device)
        reader = Reader(graph, known, recording)
        inputs = [Array.scalar(Expr("var", VARS[name], (), name)) for name in names]
        try:
            result = reader.read(inputs, exact=True)
        except Refusal:
            line = reader.line
            raise
        if function.hooked:
            result = stopped(result, OWN_GRADIENT)
        expr = cast(single_result(result, kind), RESULTS[kind]).at()
        expr = check_size(without_idle_stops(expr, kind))
    except Refusal as refusal:
        line = line or refusal.line or line_of(refusal.__traceback__)
        raise refusal.error(fn, kind, line) from None
    except Exception as error:
        cause = _cause(error)
        failed = cause or _failed(fn, kind, known, dispatch.running)
        line = line_of(error.__traceback__)
        raise failed.error(fn, kind, line) from (None if cause else error)
    volatile = function.volatile
    if len(reader.tensors) > len(known):
        volatile = volatile or "it reads tensors that no walk through it finds"
    sized = function.sized or reader.sized
    return Trace(expr, tuple(reader.tensors), sized, volatile, graph=graph)


def _cause(error: Exception) -> Refusal | None:
    """The refusal that an error of torch's tracer stands for, where that is known."""
    if type(error).__name__ in _DATA_DEPENDENT or "_local_scalar_dense" in str(error):
        return Asked()
    return _COMPILED if "dynamo-optimized" in str(error) else looked_up(error)


def _failed(
    fn: Callable[..., Any], kind: str, known: Sequence[torch.Tensor], running: Any
) -> Refusal:
    """The user's own error, if plain torch raises one for a position, too; else the tracer's."""
    inputs = [torch.zeros((), dtype=getattr(torch, VARS[name])) for name in ARGUMENTS[kind]]
    try:
        with DispatchMode(None, [*inputs, *known]), FunctionMode():
            # As torch's eager flex_attention maps it, over one position alone.
            torch.vmap(fn)(*(x.unsqueeze(0) for x in inputs)).squeeze(0)
    except Refusal:
        pass
    except Exception as own:
        return Refusal(
            f"raised {type(own).__name__}: {own}",
            "a mod runs to its end for every position",
            "mend this line",
        )
    return unread(f"{running}" if running is not None else "what torch's tracer cannot follow")


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


def _graph(run: Callable[..., Any], dtypes: Sequence[str], device: torch.device) -> GraphModule:
    """The graph of `run`, where an autograd Function is its forward."""
    inputs = [torch.zeros((), dtype=getattr(torch, t), device=device) for t in dtypes]
    with _TRACER:
        return make_fx(
            run,
            decomposition_table=decompositions(),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*inputs)


@contextmanager
def _unsaid() -> Iterator[None]:
    """torch logs a traceback for what it then raises, of which an error of ours tells."""
    log, here = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != here

    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


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


_LEAF = object()


class CannotReplace(Exception):
    """A value lives where no copy can stand in: in a set, a class, a module, behind a property."""


def lift(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace, chosen: Iterable[int]
) -> tuple[Trace, set[int]] | None:
    """A trace in which what Python computes of the chosen scalars is arguments, or None.

    Then which scalars Python asked for: the trace holds for their present values alone.
    It is a trace of a copy, and must become `plain` with the present values. That would hold of
    a copy that reads a number where it was not replaced, too: a look at one says where it is.
    """
    slots = sorted(chosen)
    recording = Recording()

    def replaced(values: Iterable[Any]) -> Any:
        paths = [identity.paths[i] for i in slots]
        return substitute(fn, dict(zip(paths, values, strict=True)))

    others = {i: _other(identity.scalars[i]) for i in slots}
    numbers = [HostNumber(recording, f"s[{i}]", identity.scalars[i]) for i in slots]
    try:
        seen = identify(replaced(others.values()), kind).scalars
        if seen != [others.get(i, scalar) for i, scalar in enumerate(identity.scalars)]:
            return None
        lifted = trace(replaced(numbers), kind, identity.tensors, recording, grad=identity.grad)
    except (FlexAttnError, CannotReplace):
        return None
    texts = tuple(recording.arguments)
    now = dict(enumerate(program(texts)(identity.scalars)))
    if recording.failed or lifted.volatile or plug(lifted.expr, now) is not plain.expr:
        return None
    constant = {slot: now[slot] for slot, text in enumerate(texts) if not scalars_of(text)}
    return replace(lifted, expr=plug(lifted.expr, constant), texts=texts), recording.asked


def _other(number: int | float) -> int | float:
    return number + 1 if isinstance(number, int) else float(number == 0)


def replaceable(identity: Identity, scalar: int) -> bool:
    """True if a scalar is reached by one path alone, so that replacing it there is enough."""
    path: Path = identity.paths[scalar]
    while path:
        if path in identity.shared:
            return False
        path = path[0]
    return () not in identity.shared


def substitute(fn: Any, replacements: Mapping[Path, Any]) -> Any:
    """A callable like `fn` that reads these values at these paths; raises CannotReplace."""
    tree: dict[Any, Any] = {}
    for path, value in replacements.items():
        steps: list[Any] = []
        while path:
            path, *step = path
            steps += reversed(step)
        branch = tree
        for step in reversed(steps):
            branch = branch.setdefault(step, {})
        branch[_LEAF] = value
    try:
        return _rebuilt(fn, tree)
    except Exception as error:  # a copy runs code of its class
        raise CannotReplace from error


def _rebuilt(value: Any, tree: dict[Any, Any]) -> Any:
    """A value with a replaced part for each of the tree's: {part: {name: tree}}."""
    if _LEAF in tree:
        return tree[_LEAF]
    if isinstance(value, types.FunctionType):
        return _function(value, tree)
    (part,) = tree
    if part == "item" and (type(value) in (list, dict, tuple) or hasattr(value, "_make")):
        return _changed(value, tree[part])
    if part == "attr":
        return _object(value, tree[part])
    raise CannotReplace


def _changed(values: Any, branches: dict[Any, Any] | None) -> Any:
    """A dict, a list or a tuple with some of its items replaced; itself where none are."""
    if not branches:
        return values
    new = {name: _rebuilt(values[name], branch) for name, branch in branches.items()}
    if isinstance(values, dict):
        return {**values, **new}
    items = [new.get(i, item) for i, item in enumerate(values)]
    return values._make(items) if hasattr(values, "_make") else type(values)(items)


def _function(fn: types.FunctionType, tree: dict[Any, Any]) -> types.FunctionType:
    if tree.keys() - {"cell", "global", "default", "kwdefault"}:
        raise CannotReplace
    code, cells, values = fn.__code__, list(fn.__closure__ or ()), fn.__defaults__ or ()
    for name, branch in tree.get("cell", {}).items():
        i = code.co_freevars.index(name)
        cells[i] = types.CellType(_rebuilt(cells[i].cell_contents, branch))
    scope = _changed(fn.__globals__, tree.get("global"))
    named = zip(code.co_varnames[code.co_argcount - len(values) :], values, strict=False)
    defaults = tuple(_changed(dict(named), tree.get("default")).values())
    new = types.FunctionType(code, scope, fn.__name__, defaults, tuple(cells) or None)
    new.__dict__.update(fn.__dict__)
    new.__kwdefaults__ = _changed(fn.__kwdefaults__, tree.get("kwdefault"))
    return new


def _object(value: Any, branches: dict[str, Any]) -> Any:
    if isinstance(value, torch.Tensor):  # a copy is another tensor than the captured one
        raise CannotReplace
    changed = {name: _rebuilt(getattr(value, name), b) for name, b in branches.items()}
    if isinstance(value, types.MethodType):
        return types.MethodType(*_parts(value, changed, "__func__", "__self__"))
    if isinstance(value, functools.partial):
        fn, args, keywords = _parts(value, changed, "func", "args", "keywords")
        return functools.partial(fn, *args, **keywords)
    if isinstance(value, (type, types.ModuleType)):
        raise CannotReplace
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return value._replace(**changed)
    for name in changed:
        if isinstance(getattr(type(value), name, None), property):
            raise CannotReplace
    new = copy.copy(value)
    if new is value:
        raise CannotReplace
    for name, item in changed.items():
        _set(new, name, item)
    return new


def _parts(value: Any, changed: dict[str, Any], *names: str) -> list[Any]:
    return [changed.get(name, getattr(value, name)) for name in names]


def _set(owner: Any, name: str, value: Any) -> None:
    # Past __setattr__, which a frozen dataclass forbids and which in nn.Module would reach
    # the dict of submodules that a shallow copy shares with the original.
    if hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)
