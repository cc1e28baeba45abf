"""aten's views, indexing, factories, reductions, products and searches on lazy arrays.

What looks at many elements is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch._prims_common import reduction_dims

from flexattn.errors import NoKernelError
from flexattn.mods.arrays import (
    Array,
    Index,
    broadcast,
    index,
    literal_array,
    reshape,
)
from flexattn.mods.expr import Expr, const, integer
from flexattn.mods.ops import dtype_of, is_float, name_of
from flexattn.mods.pointwise import Operand, as_array, cast, pointwise, promoted
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import applied, make

_END = 2**62


def reads_sizes(name: str, args: Sequence[Any]) -> bool:
    """True if an operation on a captured tensor means something else for other sizes of it."""
    if name in ("permute", "transpose", "t", "unsqueeze", "clone", "alias", "detach"):
        return False
    if name == "select":
        return not args[0].wraps[args[1]]
    if name == "slice":
        return not _whole(*args[2:])
    if name == "index":
        given = [(dim, at) for dim, at in enumerate(args[1]) if at is not None]
        return any(at.shape or not args[0].wraps[dim] for dim, at in given)
    return True


def _rearranged(x: Array, order: Sequence[int | None]) -> Array:
    """Dimension i of the result is dimension order[i] of x, or a new one of size 1."""
    shape = [1 if dim is None else x.shape[dim] for dim in order]
    wraps = [dim is not None and x.wraps[dim] for dim in order]

    def at(i: Index) -> Expr:
        source = dict(zip(order, i, strict=True))
        return x.at(tuple(source.get(dim, integer(0)) for dim in range(len(x.shape))))

    return Array(shape, x.dtype, at, weak=x.weak, wraps=wraps)


def dims_of(x: Array, dims: int | Sequence[int] | None) -> list[int]:
    """The dimensions that an operation names, none of them negative; all where it names none."""
    named = [dims] if isinstance(dims, int) else dims
    return list(reduction_dims(x.shape, named or None))[: len(x.shape)]


def unsqueeze(x: Array, dim: int) -> Array:
    """The array with a new dimension of size 1."""
    order: list[int | None] = list(range(len(x.shape)))
    order.insert(dim % (len(order) + 1), None)
    return _rearranged(x, order)


def _squeeze(x: Array, dims: int | Sequence[int] | None = None) -> Array:
    gone = {dim for dim in dims_of(x, dims) if x.shape[dim] == 1}
    return _rearranged(x, [dim for dim in range(len(x.shape)) if dim not in gone])


def _select(x: Array, dim: int, position: int | Array) -> Array:
    at = position if isinstance(position, Array) else Array.scalar(integer(position))
    return index(x, [*[None] * (dim % len(x.shape)), at])


def _whole(start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    return start in (None, 0) and (end is None or end >= _END) and step == 1


def _slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    if _whole(start, end, step):
        return x
    return index(x, [*[None] * dim, _arange(*slice(start, end, step).indices(x.shape[dim]))])


def _broadcast_in_dim(x: Array, shape: Sequence[int], dims: Sequence[int]) -> Array:
    source = dict(zip(dims, range(len(dims)), strict=True))
    return broadcast(_rearranged(x, list(map(source.get, range(len(shape))))), shape)


def _split(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    ends = accumulate(sizes)
    pairs = zip(ends, sizes, strict=True)
    return [_slice(x, dim % len(x.shape), end - size, end) for end, size in pairs]


def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    dim %= len(arrays[0].shape)
    dtype = promoted([*arrays])
    ends = [sum(a.shape[dim] for a in arrays[: i + 1]) for i in range(len(arrays))]
    shape = (*arrays[0].shape[:dim], ends[-1], *arrays[0].shape[dim + 1 :])

    def at(i: Index) -> Expr:
        here: Expr | None = None
        for array, end in reversed(list(zip(arrays, ends, strict=True))):
            start = integer(end - array.shape[dim])
            local = applied("sub", i[dim], start)
            inside = applied("lt", i[dim], integer(end))
            if inside.op == "const" and not inside.value:
                continue
            value = cast(array, dtype).at((*i[:dim], local, *i[dim + 1 :]))
            here = value if here is None else make("where", dtype, (inside, value, here))
        assert here is not None
        return here

    return Array(shape, dtype, at)


def _gather(x: Array, dim: int, position: Array, **_: Any) -> Array:
    def at(i: Index) -> Expr:
        here = Array.scalar(position.at(i))
        chosen = index(x, [*[None] * (dim % len(x.shape)), here])
        return chosen.at((*i[: dim % len(x.shape)], *i[dim % len(x.shape) + 1 :]))

    return Array(position.shape, x.dtype, at)


def _full(
    size: Sequence[int], value: Operand, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    if dtype is None and isinstance(value, float):
        dtype = torch.get_default_dtype()
    natural = "bool" if isinstance(value, bool) else "int64"
    return broadcast(cast(value, name_of(dtype) if dtype else natural), size)


def _full_like(x: Array, value: Operand, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return _full(x.shape, value, dtype or dtype_of(x.dtype))


def _filled(
    value: Operand, size: Sequence[int] = (), dtype: torch.dtype | None = None, **_: Any
) -> Array:
    return _full(size, value, dtype or torch.get_default_dtype())


def _arange(*ends: int | float, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Integers are computed where they are looked at, so a slice may be of any length."""
    values = torch.arange(*ends, dtype=dtype, device="cpu")
    if not all(isinstance(end, int) for end in ends) or values.is_floating_point():
        return literal_array(values.tolist(), values.shape, name_of(values.dtype))
    first, step = int(ends[0] if len(ends) > 1 else 0), int(ends[2] if len(ends) > 2 else 1)

    def at(i: Index) -> Expr:
        whole = applied("add", applied("mul", i[0], integer(step)), integer(first))
        return make("cast", name_of(values.dtype), (whole,))

    return Array(values.shape, name_of(values.dtype), at)


TENSORWISE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), reshape),
    "split_with_sizes": _split,
    "permute": lambda x, dims: _rearranged(x, dims_of(x, dims)),
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("squeeze", "squeeze_"), _squeeze),
    "select": _select,
    "slice": _slice,
    "broadcast_in_dim": _broadcast_in_dim,
    "cat": _cat,
    "index": index,
    "gather": _gather,
    "empty": partial(_filled, 0),
    "empty_like": lambda x, **options: _full_like(x, 0, **options),
    "full": _full,
    "full_like": _full_like,
    "scalar_tensor": _filled,
    "arange": _arange,
}


def _bucketize(
    x: Operand,
    bounds: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Array:
    """The number of sorted bounds before x, by comparing with each; NaN is after all."""
    if len(bounds.shape) != 1:
        raise Refusal(
            f"searches in a tensor of shape {list(bounds.shape)}",
            "sorted bounds have one dimension",
            "index it down to one dimension before",
            raises=NoKernelError,
        )
    last = unsqueeze(as_array(x), len(as_array(x).shape))
    before = pointwise("not", pointwise("gt" if right or side == "right" else "ge", bounds, last))
    return _reduced("add", before, len(before.shape) - 1, dtype="int32" if out_int32 else "int64")


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


def _total(
    op: str, x: Array, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    result = name_of(dtype) if dtype else x.dtype if is_float(x.dtype) else "int64"
    return _reduced(op, x, dims, keepdim, dtype=result, inner=_accumulator(result))


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


REDUCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mm", "bmm"), _mm),
    "bucketize": _bucketize,
    "searchsorted": lambda bounds, x, **how: _bucketize(x, bounds, **how),
    "sum": partial(_total, "add"),
    "prod": partial(_total, "mul"),
    "any": partial(_truth, "or"),
    "all": partial(_truth, "and"),
    "amax": partial(_reduced, "maximum"),
    "amin": partial(_reduced, "minimum"),
    "max": partial(_extreme, "maximum"),
    "min": partial(_extreme, "minimum"),
}
