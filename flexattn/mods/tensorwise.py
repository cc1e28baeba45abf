"""aten's views, indexing and factories on lazy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flexattn.mods.arrays import (
    Array,
    Index,
    broadcast,
    index,
    index_put,
    literal_array,
    reshape,
)
from flexattn.mods.expr import Expr, const
from flexattn.mods.ops import dtype_of
from flexattn.mods.pointwise import Operand, cast
from flexattn.mods.simplify import applied, make

_END = 2**62


def reads_sizes(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation on a captured tensor means something else for other sizes of it."""
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


def _int(value: int) -> Expr:
    return const(value, "int64")


def _rearranged(x: Array, order: Sequence[int | None]) -> Array:
    """Dimension i of the result is dimension order[i] of x, or a new one of size 1."""
    shape = [1 if dim is None else x.shape[dim] for dim in order]
    wraps = [dim is not None and x.wraps[dim] for dim in order]

    def at(i: Index) -> Expr:
        source = dict(zip(order, i, strict=True))
        return x.at(tuple(source.get(dim, _int(0)) for dim in range(len(x.shape))))

    return Array(shape, x.dtype, at, weak=x.weak, wraps=wraps)


def dims_of(x: Array, dims: int | Sequence[int] | None) -> list[int]:
    """The dimensions that an operation names, none of them negative; all where it names none."""
    rank = len(x.shape)
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(rank))
    return [dim % max(rank, 1) for dim in ([dims] if isinstance(dims, int) else dims)][:rank]


def _permute(x: Array, dims: Sequence[int]) -> Array:
    return _rearranged(x, dims_of(x, dims))


def _transpose(x: Array, first: int = 0, second: int = 1) -> Array:
    order = list(range(len(x.shape)))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return _rearranged(x, order)


def unsqueeze(x: Array, dim: int) -> Array:
    """The array with a new dimension of size 1."""
    order: list[int | None] = list(range(len(x.shape)))
    order.insert(dim % (len(order) + 1), None)
    return _rearranged(x, order)


def _squeeze(x: Array, dims: int | Sequence[int] | None = None) -> Array:
    gone = {dim for dim in dims_of(x, dims) if x.shape[dim] == 1}
    return _rearranged(x, [dim for dim in range(len(x.shape)) if dim not in gone])


def _select(x: Array, dim: int, position: int) -> Array:
    at = Array.scalar(_int(position))
    return index(x, [*[None] * (dim % len(x.shape)), at])


def _whole(start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    return start in (None, 0) and (end is None or end >= _END) and step == 1


def _slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    if _whole(start, end, step):
        return x
    return index(x, [*[None] * dim, _arange(*slice(start, end, step).indices(x.shape[dim]))])


def _expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    lead = len(size) - len(x.shape)
    shape = [x.shape[dim - lead] if n == -1 else n for dim, n in enumerate(size)]
    return broadcast(x, shape)


def _broadcast_in_dim(x: Array, shape: Sequence[int], dims: Sequence[int]) -> Array:
    source = dict(zip(dims, range(len(dims)), strict=True))
    return broadcast(_rearranged(x, list(map(source.get, range(len(shape))))), shape)


def _split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    total = x.shape[dim]
    sizes = [size] * math.ceil(total / size) if isinstance(size, int) else size
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pairs = zip(starts, sizes, strict=True)
    return [_slice(x, dim % len(x.shape), start, min(start + n, total)) for start, n in pairs]


def _cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    dim %= len(arrays[0].shape)
    dtype = _common(arrays)
    ends = [sum(a.shape[dim] for a in arrays[: i + 1]) for i in range(len(arrays))]
    shape = (*arrays[0].shape[:dim], ends[-1], *arrays[0].shape[dim + 1 :])

    def at(i: Index) -> Expr:
        here: Expr | None = None
        for array, end in reversed(list(zip(arrays, ends, strict=True))):
            start = _int(end - array.shape[dim])
            local = applied("sub", i[dim], start)
            inside = applied("lt", i[dim], _int(end))
            if inside.op == "const" and not inside.value:
                continue
            value = cast(array, dtype).at((*i[:dim], local, *i[dim + 1 :]))
            here = value if here is None else make("where", dtype, (inside, value, here))
        assert here is not None
        return here

    return Array(shape, dtype, at)


def _common(arrays: Sequence[Array]) -> str:
    dtypes = [getattr(torch, array.dtype) for array in arrays]
    common = dtypes[0]
    for dtype in dtypes:
        common = torch.promote_types(common, dtype)
    return _name(common)


def _flip(x: Array, dims: Sequence[int]) -> Array:
    for dim in dims_of(x, dims):
        x = index(x, [*[None] * dim, _arange(x.shape[dim] - 1, -1, -1)])
    return x


def _diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """torch has the diagonal last."""
    rank = len(x.shape)
    one, other = dim1 % rank, dim2 % rank
    rest = [dim for dim in range(rank) if dim not in (one, other)]
    down, along = max(-offset, 0), max(offset, 0)
    length = max(0, min(x.shape[one] - down, x.shape[other] - along))

    def at(i: Index) -> Expr:
        full = dict(zip(rest, i, strict=False))
        full[one] = applied("add", i[-1], _int(down))
        full[other] = applied("add", i[-1], _int(along))
        return x.at(tuple(full[dim] for dim in range(rank)))

    return Array((*(x.shape[dim] for dim in rest), length), x.dtype, at)


def _diagonal_scatter(x: Array, y: Array, *which: int) -> Array:
    """x with another diagonal."""
    offset, dim1, dim2 = (*which, *(0, 0, 1)[len(which) :])
    one, other = dim1 % len(x.shape), dim2 % len(x.shape)

    def at(i: Index) -> Expr:
        inside = applied("eq", applied("sub", i[other], i[one]), _int(offset))
        rest = [each for dim, each in enumerate(i) if dim not in (one, other)]
        last = applied("add", i[one], _int(min(offset, 0)))
        return make("where", x.dtype, (inside, y.at((*rest, last)), x.at(i)))

    return Array(x.shape, x.dtype, at)


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
    return broadcast(cast(value, _name(dtype) if dtype else natural), size)


def _filled(
    value: Operand, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any
) -> Array:
    return _full(size, value, dtype or torch.get_default_dtype())


def _filled_like(value: Operand, x: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return broadcast(cast(value, _name(dtype) if dtype else x.dtype), x.shape)


def _arange(*ends: int | float, dtype: torch.dtype | None = None, **_: Any) -> Array:
    values = torch.arange(*ends, dtype=dtype, device="cpu")
    return literal_array(values.tolist(), values.shape, _name(values.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TENSORWISE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), reshape),
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "permute": _permute,
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("squeeze", "squeeze_"), _squeeze),
    "select": _select,
    "slice": _slice,
    "expand": _expand,
    "broadcast_in_dim": _broadcast_in_dim,
    "unbind": lambda x, dim=0: [_select(x, dim, i) for i in range(x.shape[dim])],
    "cat": _cat,
    "flip": _flip,
    "diagonal": _diagonal,
    "diagonal_scatter": _diagonal_scatter,
    "index": index,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), index_put),
    "embedding": lambda table, position, *_: index(table, [position]),
    "gather": _gather,
    "take": lambda x, position: index(reshape(x, [-1]), [position]),
    "empty": partial(_filled, 0),
    "empty_like": partial(_filled_like, 0),
    "new_empty": lambda x, size, dtype=None, **_: _filled(0, size, dtype or dtype_of(x.dtype)),
    "full": _full,
    "full_like": lambda x, value, **options: _filled_like(value, x, **options),
    "scalar_tensor": lambda value, **options: _filled(value, [], **options),
    "arange": _arange,
}
