"""Triton's interpreter under watch: where kernels read and write, and who writes meanwhile."""

from contextlib import contextmanager

import numpy as np
from triton.runtime import interpreter

LOADS = ("create_masked_load", "create_atomic_rmw", "create_atomic_cas")
STORES = ("create_masked_store",)


class OutOfBounds(AssertionError):
    """A kernel touched memory that is none of its own."""


@contextmanager
def watched(tensors, before_each=lambda: None):
    """Every load and store lies in one of these tensors; `before_each` runs before each load.

    tensors: each of one span of memory. Raises OutOfBounds through the interpreter.
    """
    spans = np.array(
        sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors),
        dtype=np.uint64,
    )
    builder = interpreter.interpreter_builder
    kept = {name: getattr(builder, name) for name in (*LOADS, *STORES)}

    def checked(name):
        def call(*given, **named):
            if name in LOADS:
                before_each()
            pointers = given[1 if name == "create_atomic_rmw" else 0]
            mask = {"create_masked_store": 2, "create_masked_load": 1, "create_atomic_rmw": 3}
            wanted = given[mask[name]].data if name in mask else np.True_
            _check(name, pointers, wanted, spans)
            return kept[name](*given, **named)

        return call

    for name in kept:
        setattr(builder, name, checked(name))
    try:
        yield
    finally:
        for name in kept:
            delattr(builder, name)


def _check(name, pointers, wanted, spans):
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    at = np.asarray(pointers.data, dtype=np.uint64)
    at = at[np.broadcast_to(np.asarray(wanted, dtype=bool), at.shape)].reshape(-1)
    place = np.searchsorted(spans[:, 0], at, side="right").astype(np.int64) - 1
    inside = (place >= 0) & (at + np.uint64(size) <= spans[np.maximum(place, 0), 1])
    if not inside.all():
        raise OutOfBounds(f"{name} at {int(at[~inside][0]):#x}, {spans.tolist()} are its own")
