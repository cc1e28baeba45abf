"""What a user calls a tensor that a mod captures, for messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

__all__ = ["capture_name"]

_DEPTH = 4


def capture_name(fn: Any, tensor: torch.Tensor) -> str:
    """The name by which a mod, or what it calls, holds a tensor; else "a captured tensor"."""
    level: list[tuple[str, Any]] = [("", fn)]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, holder in level:
            for part, value in _held(holder):
                if value is tensor:
                    return part if part.isidentifier() else f"{name}{part}"
                if id(value) not in seen:
                    seen.add(id(value))
                    below.append((part, value))
        level = below
    return "a captured tensor"


def _held(holder: Any) -> Iterator[tuple[str, Any]]:
    """What a callable or a container holds, by name."""
    if isinstance(holder, FunctionType):
        yield from _read(holder)
    elif isinstance(holder, MethodType):
        yield from _held(holder.__func__)
        yield from _held(holder.__self__)
    elif isinstance(holder, functools.partial):
        yield "", holder.func
        yield from holder.keywords.items()
        yield from zip(_arguments(holder.func), holder.args, strict=False)
    elif isinstance(holder, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(holder))
    elif isinstance(holder, dict):
        yield from ((str(key), value) for key, value in holder.items())
    elif isinstance(holder, ModuleType):
        tensors = vars(holder).items()
        yield from ((name, value) for name, value in tensors if isinstance(value, torch.Tensor))
    elif hasattr(holder, "__dict__"):
        yield from vars(holder).items()


def _read(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that was emptied
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    yield from zip(_arguments(fn)[::-1], (fn.__defaults__ or ())[::-1], strict=False)
    yield from (fn.__kwdefaults__ or {}).items()


def _arguments(fn: Any) -> tuple[str, ...]:
    code = getattr(fn, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]
