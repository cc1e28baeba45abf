"""aten's reductions, products and searches on lazy arrays, unrolled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flexattn.errors import NoKernelError
from flexattn.mods.arrays import Array, Index, broadcast, index, reshape
from flexattn.mods.expr import Expr, const
from flexattn.mods.ops import is_float
from flexattn.mods.pointwise import Operand, as_array, cast, pointwise
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import make
from flexattn.mods.tensorwise import dims_of, unsqueeze


def _searched(x: Operand, bounds: Array, right: bool, int32: bool) -> Array:
    """How many of the sorted bounds are before x, by comparing with each; NaN is after all."""
    if len(bounds.shape) != 1:
        raise Refusal(
            f"searches in a tensor of shape {list(bounds.shape)}",
            "sorted bounds have one dimension",
            "index it down to one dimension before",
            raises=NoKernelError,
        )
    last = unsqueeze(as_array(x), len(as_array(x).shape))
    before = pointwise("not", pointwise("gt" if right else "ge", bounds, last))
    return _reduced("add", before, len(before.shape) - 1, dtype="int32" if int32 else "int64")


def _bucketize(
    x: Operand, bounds: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    return _searched(x, bounds, right, out_int32)


def _searchsorted(
    bounds: Array,
    x: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    bounds = bounds if sorter is None else index(bounds, [sorter])
    return _searched(x, bounds, right or side == "right", out_int32)


def _accumulator(dtype: str) -> str:
    """torch sums half precision in float32, and small integers in int64."""
    if is_float(dtype):
        return "float64" if dtype == "float64" else "float32"
    return "int64"


def _reduced(
    op: str,
    x: Array,
    dims: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: str | None = None,
    inner: str | None = None,
) -> Array:
    """Unroll a reduction over some dimensions, in `inner` if it accumulates wider than `dtype`."""
    gone = dims_of(x, dims)
    dtype = dtype or x.dtype
    inner = inner or dtype
    terms = x.elements(gone)
    kept = [dim for dim in range(len(x.shape)) if dim not in gone]
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape)]
    wide = cast(x, inner)
    neutral = {"add": 0, "mul": 1, "and": True, "or": False}

    def at(i: Index) -> Expr:
        others = dict(zip(kept, [i[dim] for dim in kept] if keepdim else i, strict=True))
        total: Expr | None = None
        for term in terms:
            full = others | dict(zip(gone, term, strict=True))
            value = wide.at(tuple(full[dim] for dim in range(len(full))))
            total = value if total is None else make(op, inner, (total, value))
        if total is None:
            total = make("cast", inner, (const(neutral[op], "int64"),))
        return make("cast", dtype, (total,))

    return Array(shape if keepdim else [x.shape[dim] for dim in kept], dtype, at)


def _sum(
    x: Array, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    result = _name(dtype) if dtype else x.dtype if is_float(x.dtype) else "int64"
    return _reduced("add", x, dims, keepdim, dtype=result, inner=_accumulator(result))


def _prod(x: Array, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    result = _name(dtype) if dtype else x.dtype if is_float(x.dtype) else "int64"
    return _reduced("mul", x, dims, keepdim, dtype=result, inner=_accumulator(result))


def _mean(
    x: Array, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    result = _name(dtype) if dtype else x.dtype
    inner = _accumulator(result)
    total = _reduced("add", x, dims, keepdim, dtype=inner)
    count = math.prod(x.shape[dim] for dim in dims_of(x, dims))
    return cast(pointwise("div", total, float(count)), result)


def _var(
    x: Array,
    dims: Any = None,
    correction: float | None = 1,
    keepdim: bool = False,
) -> Array:
    count = math.prod(x.shape[dim] for dim in dims_of(x, dims))
    wide = cast(x, _accumulator(x.dtype))
    away = pointwise("sub", wide, _mean(wide, dims, keepdim=True))
    total = _reduced("add", pointwise("mul", away, away), dims, keepdim)
    left = max(count - (1 if correction is None else correction), 0)
    return cast(pointwise("div", total, float(left)), x.dtype)


def _truth(op: str, x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    return _reduced(op, cast(x, "bool"), dims, keepdim)


def _extreme(op: str, x: Array, dims: Any = None, keepdim: bool = False) -> Any:
    """max and min: over everything, or (values, indices) over one dimension."""
    best = _reduced(op, x, dims, keepdim)
    return best if dims is None else (best, None)


def _mm(x: Array, y: Array) -> Array:
    """Contract x's last dimension with the one before the last of y, batched over the rest."""
    batch = x.shape[:-2]
    left = unsqueeze(x, len(x.shape))
    right = unsqueeze(y, len(batch))
    shape = (*batch, x.shape[-2], x.shape[-1], y.shape[-1])
    wide = _accumulator(x.dtype)
    factors = [cast(broadcast(side, shape), wide) for side in (left, right)]
    product = pointwise("mul", *factors)
    return _reduced("add", product, len(shape) - 2, dtype=x.dtype, inner=wide)


def _dot(x: Array, y: Array) -> Array:
    return reshape(_mm(unsqueeze(x, 0), unsqueeze(y, 1)), [])


def _mv(x: Array, y: Array) -> Array:
    return reshape(_mm(x, unsqueeze(y, 1)), [x.shape[0]])


def _plus(product: Callable[..., Array], c: Array, x: Array, y: Array, **by: float) -> Array:
    scaled = pointwise("mul", product(x, y), by.get("alpha", 1))
    return pointwise("add", pointwise("mul", c, by.get("beta", 1)), scaled)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


REDUCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("dot", "vdot"), _dot),
    **dict.fromkeys(("mm", "bmm"), _mm),
    **dict.fromkeys(("addmm", "baddbmm"), partial(_plus, _mm)),
    "addmv": partial(_plus, _mv),
    "mv": _mv,
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "var": _var,
    "any": partial(_truth, "or"),
    "all": partial(_truth, "and"),
    "amax": partial(_reduced, "maximum"),
    "amin": partial(_reduced, "minimum"),
    "max": partial(_extreme, "maximum"),
    "min": partial(_extreme, "minimum"),
}
