"""Lift captured numbers into run-time arguments, and prove that nothing else changed by it."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from flexattn.errors import FlexAttnError
from flexattn.mods.host_numbers import HostNumber, Recording, program, scalars_of
from flexattn.mods.identity import Identity, Path, identify
from flexattn.mods.simplify import plug
from flexattn.mods.trace import Trace, trace

_LEAF = object()


class CannotReplace(Exception):
    """A value lives where no copy can stand in: in a set, behind a property, in a class's code."""


def lift(
    fn: Callable[..., Any], kind: str, identity: Identity, plain: Trace, chosen: Iterable[int]
) -> Trace | None:
    """A trace in which what Python computes of the chosen scalars is arguments, or None.

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
    guards = tuple(sorted(recording.guards))
    return replace(lifted, expr=plug(lifted.expr, constant), texts=texts, guards=guards)


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
    if isinstance(value, type):
        if not hasattr(value, "__mro__") or any(
            "__init_subclass__" in vars(c) for c in value.__mro__[:-1]
        ):
            raise CannotReplace
        return type(value)(value.__name__, (value,), changed)
    if isinstance(value, types.ModuleType):
        stand_in = types.ModuleType(value.__name__)
        stand_in.__dict__.update(vars(value) | changed)
        return stand_in
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
