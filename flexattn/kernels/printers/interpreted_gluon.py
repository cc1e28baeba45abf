"""The functions of Gluon kernels without shared memory, for Triton's CPU interpreter.

There a tensor has no layout: what only moves values between threads does nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

gluon = SimpleNamespace(jit=triton.jit)


def __getattr__(name: str) -> Any:
    """Everything else is Triton's own, as the interpreter replaces it."""
    return getattr(tl, name)


def arange(start: int, end: int, layout: Any) -> Any:
    """tl.arange."""
    return tl.arange(start, end)


def zeros(shape: list[int], dtype: Any, layout: Any) -> Any:
    """tl.zeros."""
    return tl.zeros(shape, dtype)


def full(shape: list[int], value: Any, dtype: Any, layout: Any) -> Any:
    """tl.full."""
    return tl.full(shape, value, dtype)


def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
    """The same values."""
    return x


def associative_scan(x: Any, axis: int, combine: Any) -> Any:
    """Running sums, the one scan that there is."""
    return tl.cumsum(x, axis)


def mma_v2(a: Any, b: Any, acc: Any) -> Any:
    """The product in float64: the interpreter's of bfloat16 is garbage.

    Of 16 bits its sums are all but exact, so that they do not depend on how many rows there are.
    """
    wide = tl.dot(a.to(tl.float64), b.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64)
    return wide.to(tl.float32)


def barrier() -> None:
    """One program runs at a time, as one thread."""


def _layout(*about: Any) -> None:
    """No layout."""


SliceLayout = BlockedLayout = DotOperandLayout = _layout
DistributedLinearLayout = NVMMADistributedLayout = _layout
