"""Triton's interpreter without what it does over and over: the same values in a third of the time.

Of a test's time in the interpreter, a sixth went into patching triton.language again at every call
of a device function, a quarter into finding out with a dozen of Triton's own operations whether a
sum of integers overflows, which it then tells nobody, and a sixteenth into building one table of
dtypes per operation. Here a sum that overflows is an error. Of what was left, a third went into
types: each operation made its result's type, shape and number of elements anew. Of what was left
then, a fifth went into the checks of two operands that are alike, or one of which is a number that
was made a whole block, and a tenth into reading the text of functions that other kernels have too.
"""

from __future__ import annotations

import inspect
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
        shape = type.__dict__.get("_shape_and_numel")
        if shape is None:
            sizes = tuple(type.shape.values) if type.is_block() else ()
            if sizes not in known:
                make(self, handle, type)
                known[sizes] = self.shape, self.numel
            shape = type._shape_and_numel = known[sizes]
        self.shape, self.numel = shape
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _fits(fits):
    """_validate_np_data_size with a table that is filled once."""
    known = {}

    def lookup(array, dtype):
        key = dtype.name, array.itemsize
        found = known.get(key)
        return found if found is not None else known.setdefault(key, fits(array, dtype))

    return lookup


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


def _operands(check):
    """binary_op_type_checking_impl without casts of what is cast, and without wider copies.

    numpy widens what it computes with, so of two shapes that differ only the type is made one.
    """

    def operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, cast=True, div=False):
        lhs_type, rhs_type = type(lhs), type(rhs)
        made = None
        if lhs_type is rhs_type is tl.tensor:
            if _keep_dtypes(lhs.dtype, rhs.dtype, allow_lhs_ptr, div):
                made = (lhs, rhs) if lhs.shape is rhs.shape else _of_one_shape(lhs, rhs)
        elif lhs_type is tl.tensor and _keeps_dtype(rhs, rhs_type, lhs.dtype, div):
            made = lhs, _number(self, rhs, lhs.type)
        elif rhs_type is tl.tensor and _keeps_dtype(lhs, lhs_type, rhs.dtype, div):
            made = _number(self, lhs, rhs.type), rhs
        return made or check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, cast, div)

    return operands


_SIGNED = (tl.int32, tl.int64)
_FLOATING = (tl.float32, tl.float16, tl.bfloat16)


def _keep_dtypes(lhs, rhs, allow_lhs_ptr, div):
    """Whether tensors of these dtypes are computed with as they are."""
    if lhs.is_ptr():
        return allow_lhs_ptr and rhs in _SIGNED
    return lhs is rhs and (not div or lhs is tl.float32 or not lhs.is_floating())


def _keeps_dtype(number, kind, dtype, div):
    """Whether a tensor of this dtype and this number give the dtype again, without a complaint."""
    if kind is int and dtype in _SIGNED:
        return dtype.get_int_min_value() <= number <= dtype.get_int_max_value()
    return kind in (int, float) and dtype in _FLOATING and (not div or dtype is tl.float32)


def _number(semantic, number, type):
    made = semantic.scalar_constant(number, type.scalar)
    return tl.tensor(made.handle, type) if type.is_block() else made


def _of_one_shape(lhs, rhs):
    """Both with the type of their result, which None stands for if their shapes are at odds."""
    shape = _result_shape(lhs.shape, rhs.shape)
    return shape and tuple(
        each
        if each.shape is shape
        # Another handle: some operations change theirs.
        else tl.tensor(
            interpreter.TensorHandle(each.handle.data, each.handle.dtype),
            tl.block_type(each.dtype, shape),
        )
        for each in (lhs, rhs)
    )


def _result_shape(lhs, rhs):
    """One of two shapes of tensors if the other can be widened to it, else None."""
    key = id(lhs), id(rhs)  # shapes are made once and stay
    if key not in _RESULT_SHAPES:
        left, right = ([size.value for size in shape] for shape in (lhs, rhs))
        _RESULT_SHAPES[key] = next(
            (
                to
                for to, sizes, other in ((lhs, left, right), (rhs, right, left))
                if not other
                or (
                    len(other) == len(sizes)
                    and all(a in (1, b) for a, b in zip(other, sizes, strict=True))
                )
            ),
            None,
        )
    return _RESULT_SHAPES[key]


_RESULT_SHAPES = {}


def _calls_of_builtins():
    """_patch_attr: an operation is called as it is, not by way of the check that it is patched."""
    guarded = tl.core.builtin(lambda: None).__code__

    def patch(obj, name, member, builder, scope):
        called = member.__wrapped__ if member.__code__ is guarded else member
        semantic = interpreter.interpreter_semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return patch


def _builtins():
    """_patch_builtin: the operations of a module or a class are looked for once."""
    known = {}

    def patch(pkg, builder, scope):
        if pkg not in known:
            found = inspect.getmembers(pkg)
            known[pkg] = [each for each in found if tl.core.is_builtin(each[1])]
        for name, member in known[pkg]:
            if getattr(pkg, name) is member:  # not patched yet
                interpreter._patch_attr(pkg, name, member, builder, scope)

    return patch


def _same_texts():
    """FunctionRewriter.rewrite_ast: functions of one text, in however many files, are one code."""
    known = {}

    def rewrite(self):
        lines = inspect.getsourcelines(self.fn)[0]
        text = "".join(lines)
        if text not in known:
            self.filename, self.def_file_lineno = self._get_jit_fn_file_line()
            self.def_lineno = self._find_def(lines)
            tree = self._transform_ast(self._prepare_source(lines))
            known[text] = compile(tree, self.filename, "exec")
        scope, made = self.fn.__globals__, dict(self.kwargs)
        for name, value in vars(interpreter).items():
            scope.setdefault(name, value)
        exec(known[text], scope, made)
        return made[self.fn.__name__]

    return rewrite


def _products(create_dot):
    """create_dot in float64, rounded once: what BLAS adds up in float32 depends on the processor.

    On an EPYC without AVX-512 a row's sum depended on the rows beside it, and tests of bits and of
    float32's budget failed that had passed on other machines.
    """

    def product(builder, a, b, d, *precision):
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return create_dot(builder, a, b, d, *precision)
        found = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(found + d.data, d.dtype.scalar)

    return product


def hurry():
    """Changes the interpreter of this process, which compiles nothing."""
    tl.core._unwrap_if_constexpr = _unwrapping(tl.core._unwrap_if_constexpr)
    tl.block_type.__init__ = _block_types(tl.block_type.__init__)
    tl.tensor.__init__ = _tensors(tl.tensor.__init__)
    tl.dtype.__eq__ = _same(tl.dtype.__eq__)
    semantic = interpreter.TritonSemantic
    semantic.computation_type_impl = _result_dtypes(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl)
    interpreter._validate_np_data_size = _fits(interpreter._validate_np_data_size)
    interpreter._patch_attr = _calls_of_builtins()
    interpreter._patch_builtin = _builtins()
    interpreter.FunctionRewriter.rewrite_ast = _same_texts()
    interpreter._patch_lang = _Once(interpreter._patch_lang)
    interpreter._get_np_dtype = _dtypes(interpreter._get_np_dtype)
    semantic.binary_op_sanitize_overflow_impl = staticmethod(_refuse_overflow)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _products(builder.create_dot)
