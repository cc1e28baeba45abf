"""aten's pointwise operations on lazy arrays, with torch's type promotion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch._prims_common import elementwise_dtypes

from flexattn.mods.arrays import Array, Index, broadcast
from flexattn.mods.expr import Expr, const
from flexattn.mods.host_numbers import PROMOTION
from flexattn.mods.ops import DETACH, OPS, dtype_of, is_float, name_of
from flexattn.mods.refusal import unread
from flexattn.mods.simplify import make

Operand = Array | int | float | bool
_NUMBERS = {"bool": True, "int64": 1}


def as_array(x: Operand) -> Array:
    """An operand as an array; Python numbers become weak constants."""
    if isinstance(x, Array):
        return x
    for kind, dtype in ((bool, "bool"), (int, "int64"), (float, "float64")):
        if isinstance(x, kind):
            return Array.scalar(const(x, dtype), weak=True)
    raise unread("the place of an extreme" if x is None else f"a {type(x).__name__} as a number")


def cast(x: Operand, dtype: str) -> Array:
    """The array with every element converted."""
    array = as_array(x)
    if array.dtype == dtype and not array.weak:
        return array
    return _mapped("cast", dtype, [array])


def _mapped(op: str, dtype: str, operands: list[Array], *, weak: bool = False) -> Array:
    """One operation on the elements of broadcast operands."""
    shape = torch.broadcast_shapes(*(array.shape for array in operands))
    parts = [broadcast(array, shape) for array in operands]

    def at(index: Index) -> Expr:
        return make(op, dtype, [part.at(index) for part in parts])

    return Array(shape, dtype, at, weak=weak, parts=parts)


def promoted(arrays: list[Array]) -> str:
    """torch's result type: tensors with dimensions, then 0-d tensors, then Python numbers."""
    if all(array.weak for array in arrays):
        return name_of(reduce(torch.promote_types, [dtype_of(array.dtype) for array in arrays]))
    like = [
        _NUMBERS.get(array.dtype, 1.0)
        if array.weak
        else torch.empty([1] * len(array.shape), dtype=dtype_of(array.dtype), device="meta")
        for array in arrays
    ]
    return name_of(elementwise_dtypes(*like, type_promotion_kind=PROMOTION)[1])


def pointwise(op: str, *operands: Operand) -> Array:
    """One operation on promoted, broadcast operands, with the dtypes that its row says."""
    arrays = [as_array(x) for x in operands]
    weak = all(array.weak for array in arrays)
    dtype = promoted(arrays)
    if OPS[op].result == "float" and not is_float(dtype):
        dtype = "float64" if weak else name_of(torch.get_default_dtype())
    op = OPS[op].on_bool or op if dtype == "bool" else op
    if not is_float(dtype) and OPS[op].result == "rounded":
        return arrays[0]
    if not is_float(dtype) and OPS[op].result == "classified":
        return pointwise("ne", arrays[0], arrays[0])
    result = "bool" if OPS[op].predicate else dtype
    return _mapped(op, result, [cast(array, dtype) for array in arrays], weak=weak)


def _where(condition: Operand, x: Operand, y: Operand) -> Array:
    chosen = [as_array(x), as_array(y)]
    dtype = promoted(chosen)
    if all(a.weak for a in chosen) and is_float(dtype):  # torch.where(c, 1.0, 2.0) is no number
        dtype = name_of(torch.get_default_dtype())
    return _mapped("where", dtype, [cast(condition, "bool"), *(cast(a, dtype) for a in chosen)])


def _sum(op: str, x: Operand, y: Operand, alpha: Operand = 1) -> Array:
    scaled = y if not isinstance(alpha, Array) and alpha == 1 else pointwise("mul", y, alpha)
    return pointwise(op, x, scaled)


def _div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return pointwise("div", x, y)
    return pointwise(f"{rounding_mode}_div", x, y)


def _clamp(
    x: Operand, low: Operand | None = None, high: Operand | None = None, **ends: Operand
) -> Array:
    low, high = ends.get("min", low), ends.get("max", high)
    result = as_array(x)
    dtype = promoted([as_array(end) for end in (x, low, high) if end is not None])
    ends_of = ("clamp_min", "clamp_max") if is_float(dtype) else ("maximum", "minimum")
    for op, end in zip(ends_of, (low, high), strict=True):
        if end is not None:
            result = pointwise(op, cast(result, dtype), cast(end, dtype))
    return result


def _relu(x: Array) -> Array:
    return pointwise("relu", x) if is_float(x.dtype) else pointwise("maximum", x, cast(0, x.dtype))


def _pow(x: Operand, y: Operand) -> Array:
    """A fixed exponent is computed as torch does: by multiplication and square root."""
    if isinstance(y, Array) or y not in _POWERS:
        return pointwise("pow", x, y)
    base = cast(x, promoted([as_array(x), as_array(y)]))
    if not is_float(base.dtype) and y not in (0, 2, 3):
        return pointwise("pow", x, y)
    return _POWERS[y](base)


def _square(x: Array) -> Array:
    return pointwise("mul", x, x)


_POWERS: dict[float, Callable[[Array], Array]] = {
    0: lambda x: broadcast(cast(1, x.dtype), x.shape),
    2: _square,
    3: lambda x: pointwise("mul", _square(x), x),
    0.5: partial(pointwise, "sqrt"),
    -0.5: partial(pointwise, "rsqrt"),
    -1: partial(pointwise, "reciprocal"),
    -2: lambda x: pointwise("reciprocal", _square(x)),
}


def _logical(op: str, *operands: Operand) -> Array:
    return pointwise(op, *(cast(x, "bool") for x in operands))


def _round(x: Operand, decimals: int = 0) -> Array:
    if decimals == 0:
        return pointwise("round", x)
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    scale = 10.0 ** abs(decimals)
    return pointwise(back, pointwise("round", pointwise(there, x, scale)), scale)


def _number_of(op: str, x: Operand, y: Operand) -> Array:
    """fmax and fmin: NaN only where both are."""
    dtype = promoted([as_array(x), as_array(y)])
    x, y = cast(x, dtype), cast(y, dtype)
    if not is_float(dtype):
        return pointwise(op, x, y)
    either = _where(pointwise("isnan", y), x, pointwise(op, x, y))
    return _where(pointwise("isnan", x), y, either)


def stopped(found: Any, stop: str = DETACH) -> Any:
    """The results of an operation of a mod behind a stop, which integers do not need."""
    if isinstance(found, (list, tuple)):
        return type(found)(stopped(each, stop) for each in found)
    if not isinstance(found, Array) or not is_float(found.dtype):
        return found
    array = _mapped(stop, found.dtype, [found], weak=found.weak)
    array.wraps, array.captured = found.wraps, found.captured
    return array


def _convert(x: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return x if dtype is None else cast(x, name_of(dtype))


def _same(x: Array, **_: Any) -> Array:
    return x


# The functions below take more than operands, or become more than one operation.
POINTWISE: dict[str, Callable[..., Array]] = {
    **{name: partial(pointwise, op.name) for op in OPS.values() for name in op.traced},
    **{f"logical_{op}": partial(_logical, op) for op in ("and", "or", "xor", "not")},
    **dict.fromkeys(("clone", "alias", "lift_fresh", "lift_fresh_copy", "positive"), _same),
    "detach": stopped,
    **{op: partial(_sum, op) for op in ("add", "sub")},
    "div": _div,
    "pow": _pow,
    "clamp": _clamp,
    "where": _where,
    "clamp_min": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "relu": _relu,
    "round": _round,
    "fmax": partial(_number_of, "maximum"),
    "fmin": partial(_number_of, "minimum"),
    "copy": lambda x, y, *_: broadcast(cast(y, x.dtype), x.shape),
    "_to_copy": _convert,
    "convert_element_type": _convert,
}
