"""Triton's interpreter without what it does over and over: the same values in half the time.

Of a test's time in the interpreter, a sixth went into patching triton.language again at every call
of a device function, a quarter into finding out with a dozen of Triton's own operations whether a
sum of integers overflows, which it then tells nobody, and a sixteenth into building one table of
dtypes per operation. Here a sum that overflows is an error. Of what was left, a third went into
types: each operation made its result's type, shape and number of elements anew.
"""

from __future__ import annotations

import operator

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_PLAIN = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


class _Once:
    """_patch_lang: a function patched since the grid began stays so until the grid ends.

    The first to ask is the kernel itself, whose scope is restored at its grid's end; what device
    functions patch in between, Triton leaves.
    """

    def __init__(self, patch):
        self.patch = patch
        self.patched = set()

    def __call__(self, fn):
        if fn in self.patched:
            return None
        scope = self.patch(fn)
        begins = not self.patched
        self.patched.add(fn)
        return _Grid(scope, self.patched) if begins else scope


class _Grid:
    def __init__(self, scope, patched):
        self.scope, self.patched = scope, patched

    def restore(self):
        self.patched.clear()
        self.scope.restore()


def _dtypes(numpy_dtype_of):
    """_get_np_dtype with a table that is filled once."""
    known = {}

    def lookup(dtype):
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return known.setdefault("pointer", numpy_dtype_of(scalar))
        found = known.get(scalar.name)
        return (
            found if found is not None else known.setdefault(scalar.name, numpy_dtype_of(scalar))
        )

    return lookup


def _refuse_overflow(lhs, rhs, binary_op):
    """binary_op_sanitize_overflow_impl in one go, on numpy's numbers."""
    dtype = lhs.type.scalar
    if dtype.int_bitwidth >= 64:
        return
    left, right = (x.handle.data.astype(np.int64) for x in (lhs, rhs))
    result = _PLAIN[binary_op.__name__](left, right)
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    assert ((result >= low) & (result <= high)).all(), (
        f"int{dtype.int_bitwidth} overflow detected for operation {binary_op.__name__}"
    )


def _block_types(make):
    """block_type.__init__: equal types of blocks share what they hold, which nobody changes."""
    known = {}

    def init(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        space = getattr(element_ty, "address_space", None)
        key = (type(element_ty), element_ty.name, space, sizes)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return init


def _tensors(make):
    """tensor.__init__: tensors of one shape share its constants."""
    known = {}

    def init(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.shape, self.numel = known[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _same(equal):
    """dtype.__eq__: a dtype is itself."""
    return lambda self, other: self is other or equal(self, other)


def _unwrapping(unwrap):
    """_unwrap_if_constexpr: most of what it is asked about is nothing wrapped."""
    plain = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}
    return lambda value: value if type(value) in plain else unwrap(value)


def _result_dtypes(result_dtype):
    """computation_type_impl with a table that is filled as dtypes meet."""
    known = {}

    def lookup(self, a, *others):
        key = a.name, *(getattr(other, "name", other) for other in others)
        if key not in known:
            known[key] = result_dtype(self, a, *others)
        return known[key]

    return lookup


def _broadcast(broadcast):
    """broadcast_impl_value: there is nothing to do for two tensors of one shape."""

    def values(self, lhs, rhs):
        # Constants of a shape are made once.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return values


def hurry():
    """Changes the interpreter of this process, which compiles nothing."""
    tl.core._unwrap_if_constexpr = _unwrapping(tl.core._unwrap_if_constexpr)
    tl.block_type.__init__ = _block_types(tl.block_type.__init__)
    tl.tensor.__init__ = _tensors(tl.tensor.__init__)
    tl.dtype.__eq__ = _same(tl.dtype.__eq__)
    semantic = interpreter.TritonSemantic
    semantic.computation_type_impl = _result_dtypes(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    interpreter._patch_lang = _Once(interpreter._patch_lang)
    interpreter._get_np_dtype = _dtypes(interpreter._get_np_dtype)
    semantic.binary_op_sanitize_overflow_impl = staticmethod(_refuse_overflow)
