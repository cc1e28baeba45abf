"""Rebuild a callable with some of the values it reads replaced, leaving the original untouched."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from flexattn.mods.identity import Path

_LEAF = object()


class CannotReplace(Exception):
    """A value lives where no copy can stand in: in a set, behind a property, in a class's code."""


def substitute(fn: Any, replacements: Mapping[Path, Any]) -> Any:
    """A callable like `fn` that reads these values at these paths; raises CannotReplace."""
    tree: dict[Any, Any] = {}
    for path, value in replacements.items():
        steps: list[Any] = []
        while path:
            path, *step = path
            steps.append(tuple(step))
        branch = tree
        for step in reversed(steps):
            branch = branch.setdefault(step, {})
        branch[_LEAF] = value
    try:
        return _rebuild(fn, tree)
    except Exception as error:  # a copy runs code of its class
        raise CannotReplace from error


def _rebuild(value: Any, tree: dict[Any, Any]) -> Any:
    if _LEAF in tree:
        return tree[_LEAF]
    if isinstance(value, types.FunctionType):
        return _function(value, tree)
    if isinstance(value, types.MethodType):
        function = _rebuild(value.__func__, tree.get(("func",), {}))
        return types.MethodType(function, _rebuild(value.__self__, tree.get(("self",), {})))
    if isinstance(value, functools.partial):
        return _partial(value, tree)
    if not tree:
        return value
    kinds = {step[0] for step in tree}
    if kinds == {"item"}:
        return _container(value, tree)
    if kinds == {"attr"}:
        return _object(value, {step[1]: branch for step, branch in tree.items()})
    raise CannotReplace


def _function(fn: types.FunctionType, tree: dict[Any, Any]) -> types.FunctionType:
    parts: dict[str, dict[Any, Any]] = {}
    for (part, name), branch in tree.items():
        parts.setdefault(part, {})[name] = branch
    if not parts:
        return fn
    if parts.keys() - {"cell", "global", "default", "kwdefault"}:
        raise CannotReplace
    cells = list(fn.__closure__ or ())
    for i, branch in parts.get("cell", {}).items():
        cells[i] = types.CellType(_rebuild(cells[i].cell_contents, branch))
    scope = fn.__globals__
    if "global" in parts:
        scope = dict(scope)
        for name, branch in parts["global"].items():
            scope[name] = _rebuild(scope.get(name), branch)
    defaults = list(fn.__defaults__ or ())
    for i, branch in parts.get("default", {}).items():
        defaults[i] = _rebuild(defaults[i], branch)
    new = types.FunctionType(
        fn.__code__, scope, fn.__name__, tuple(defaults) or None, tuple(cells) or None
    )
    new.__dict__.update(fn.__dict__)
    if fn.__kwdefaults__:
        changed = parts.get("kwdefault", {})
        new.__kwdefaults__ = {
            name: _rebuild(value, changed.get(name, {}))
            for name, value in fn.__kwdefaults__.items()
        }
    return new


def _partial(fn: functools.partial[Any], tree: dict[Any, Any]) -> functools.partial[Any]:
    function = _rebuild(fn.func, tree.get(("func",), {}))
    args = [_rebuild(value, tree.get(("arg", i), {})) for i, value in enumerate(fn.args)]
    keywords = {
        name: _rebuild(value, tree.get(("keyword", name), {}))
        for name, value in fn.keywords.items()
    }
    return functools.partial(function, *args, **keywords)


def _container(value: Any, tree: dict[Any, Any]) -> Any:
    changed = {step[1]: _rebuild(value[step[1]], branch) for step, branch in tree.items()}
    if isinstance(value, tuple):
        items = (changed.get(i, item) for i, item in enumerate(value))
        if type(value) is tuple:
            return tuple(items)
        if hasattr(value, "_make"):
            return value._make(items)
    if type(value) in (list, dict):
        new = copy.copy(value)
        for name, item in changed.items():
            new[name] = item
        return new
    raise CannotReplace


def _object(value: Any, branches: dict[str, Any]) -> Any:
    if isinstance(value, torch.Tensor):  # a copy is another tensor than the captured one
        raise CannotReplace
    changed = {name: _rebuild(getattr(value, name), b) for name, b in branches.items()}
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


def _set(owner: Any, name: str, value: Any) -> None:
    # Past __setattr__, which a frozen dataclass forbids and which in nn.Module would reach
    # the dict of submodules that a shallow copy shares with the original.
    if hasattr(owner, "__dict__"):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)
