"""Guards: whether a callable still reads what it read, told without walking through it again."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import torch

from flexattn.mods.identity import MISSING, Identity


class Guards:
    """Every name that a function looks up with what it held, and what its tensors were like.

    They hold only if nothing that the function reads has changed but tensors' contents, so that
    its Mod, its numbers and its tensors are those of before. The function itself is not kept
    alive.
    """

    __slots__ = (
        "_attributes", "_cells", "_default", "_functions", "_itself", "_names", "_tensors",
    )  # fmt: skip

    def __init__(self, fn: FunctionType, identity: Identity) -> None:
        self._itself = fn.__code__, fn.__defaults__
        self._default = torch.get_default_dtype()
        self._cells: list[tuple[Any, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any]] = []
        for owner, name, value in identity.held or ():
            if isinstance(owner, FunctionType):
                if owner is not fn:
                    self._functions.append((owner, *value))
            elif isinstance(owner, dict):
                self._names.append((owner, name, value))
            else:
                self._cells.append((owner, value))
        self._tensors = [(t, t.shape, t.stride(), t.dtype, t.device) for t in identity.tensors]
        # Those that the code names would have left nothing held: others may hide a method.
        self._attributes = [(vars(t), frozenset(vars(t))) for t in identity.tensors]

    def hold(self, fn: FunctionType) -> bool:
        """Whether `fn`, the function they were made for, reads now what it read then."""
        code, defaults = self._itself
        if fn.__code__ is not code or fn.__defaults__ is not defaults:
            return False
        if torch.get_default_dtype() is not self._default:
            return False
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:  # a cell that was emptied
            return False
        for scope, name, value in self._names:
            if scope.get(name, MISSING) is not value:
                return False
        for function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        # A tensor is given other data in place by `.data = …`, as Module.to() does.
        for tensor, shape, strides, dtype, device in self._tensors:
            same = tensor.shape == shape and tensor.stride() == strides
            if not same or tensor.dtype != dtype or tensor.device != device:
                return False
        for attributes, names in self._attributes:
            if (attributes or names) and attributes.keys() != names:
                return False
        return True

    def requires_grad(self) -> bool:
        """Whether a tensor that the function captures requires grad."""
        return any([each[0].requires_grad for each in self._tensors])


def guards(fn: FunctionType, identity: Identity) -> Guards | None:
    """The guards of what a walk found, None where it met what may change unseen."""
    if identity.held is None or identity.reason:
        return None
    return None if any(each.forgiving for each in identity.codes()) else Guards(fn, identity)
