"""The names that a mod has for the tensors it captures, for messages about them."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

# So many functions, objects and containers are looked into, and so many parts of each.
_HOLDERS, _PARTS = 500, 200


def captured(fn: Callable[..., Any], tensor: torch.Tensor) -> str:
    """What a callable calls a tensor, with what it is: "`bias`, of shape [8] on cpu"."""
    name = capture_name(fn, tensor)
    return (
        f"{f'`{name}`' if name else 'a tensor'}, of shape {list(tensor.shape)} on {tensor.device}"
    )


def capture_name(fn: Callable[..., Any], tensor: torch.Tensor) -> str:
    """The shortest way from a callable to a tensor; nothing where there is none."""
    queue: deque[tuple[str, Any]] = deque([("", fn)])
    seen: set[int] = set()
    while queue and len(seen) < _HOLDERS:
        name, holder = queue.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for part, value in islice(_parts(name, holder), _PARTS):
            if value is tensor:
                return part
            queue.append((part, value))
    return ""


def _parts(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a container or an object holds, each with its name from the callable."""
    if inspect.isfunction(holder):
        code, scope = holder.__code__, holder.__globals__
        for free, cell in zip(code.co_freevars, holder.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that was emptied
                yield free, cell.cell_contents
        yield from ((each, scope[each]) for each in code.co_names if each in scope)
        for default in inspect.signature(holder).parameters.values():
            yield default.name, default.default
    elif inspect.ismethod(holder):
        yield "self", holder.__self__
        yield holder.__name__, holder.__func__
    elif isinstance(holder, functools.partial):
        with suppress(TypeError, ValueError):  # of a callable without a signature
            bound = inspect.signature(holder.func).bind_partial(*holder.args, **holder.keywords)
            yield from bound.arguments.items()
        yield "func", holder.func
    elif isinstance(holder, (list, tuple)):
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(holder))
    elif isinstance(holder, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in holder.items())
    elif inspect.ismodule(holder):
        yield from ((f"{name}.{x}", y) for x, y in vars(holder).items() if torch.is_tensor(y))
    elif not isinstance(holder, (torch.Tensor, type)):
        prefix = f"{name}." if name else "self."
        if isinstance(holder, torch.nn.Module):
            yield from ((prefix + each, x) for each, x in holder.named_parameters(recurse=False))
            yield from ((prefix + each, x) for each, x in holder.named_buffers(recurse=False))
            yield from ((prefix + each, x) for each, x in holder.named_children())
        for attribute, each in getattr(holder, "__dict__", {}).items():
            yield prefix + attribute, each
        if not name and callable(holder):
            yield "__call__", getattr(type(holder), "__call__", None)
