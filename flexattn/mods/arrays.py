"""Lazy arrays: a mod's tensors while a trace is read, a shape and an Expr for each index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch._prims_common import infer_size

from flexattn.errors import NoKernelError
from flexattn.mods.analysis.intervals import Intervals
from flexattn.mods.expr import VARS, Expr, const, integer
from flexattn.mods.refusal import Refusal
from flexattn.mods.simplify import applied, make

UNROLL_LIMIT = 128

Index = tuple[Expr, ...]

# Positions are not negative: an index built from them needs no wrap when its bounds say so.
_POSITIONS = {name: (0, 2**40) for name in VARS if name != "score"}


class Array:
    """A tensor that is computed where it is looked at.

    `weak` marks a Python number, or what was computed from Python numbers alone: it does not
    take part in type promotion within its category. `wraps[d]` says that dimension d is one of
    a buffer's, where the load itself wraps a negative index. `captured` says that sizes in
    `shape` come from a captured tensor, and so may differ in the next call. `parts` are the arrays
    that it looks at, at the same index.
    """

    __slots__ = ("_at", "_known", "captured", "dtype", "parts", "shape", "weak", "wraps")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        at: Callable[[Index], Expr],
        *,
        weak: bool = False,
        wraps: Sequence[bool] = (),
        parts: Sequence[Array] = (),
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.weak = weak
        self.captured = False
        self.wraps = tuple(wraps) or (False,) * len(self.shape)
        self.parts = tuple(parts)
        self._at = at
        self._known: dict[Index, Expr] = {}

    def at(self, index: Index = ()) -> Expr:
        """The element at an index, one Expr per dimension; each is computed once."""
        pending = [self]
        while pending and index not in self._known:
            array = pending[-1]
            below = [part for part in array.parts if index not in part._known]
            if below:
                pending += below
                continue
            pending.pop()
            if index not in array._known:
                array._known[index] = array._at(index)
        return self._known[index]

    def elements(self, dims: Sequence[int]) -> list[Index]:
        """Every index into these dimensions, bounded by what may be unrolled."""
        sizes = [self.shape[dim] for dim in dims]
        check_unroll(math.prod(sizes))
        return list(product(*([integer(i) for i in range(size)] for size in sizes)))

    @staticmethod
    def scalar(expr: Expr, *, weak: bool = False) -> Array:
        """A 0-d array."""
        return Array((), expr.dtype, lambda _: expr, weak=weak)


def check_unroll(terms: int) -> None:
    """Refuse an array operation that would become too many scalar ones."""
    if terms > UNROLL_LIMIT:
        raise Refusal(
            f"works on {terms} elements for one score",
            f"a reduction or dot product inside a mod is unrolled, up to {UNROLL_LIMIT} terms",
            "compute it outside of the mod, capture the result and index it",
            raises=NoKernelError,
        )


def buffer(slot: int, shape: Sequence[int], dtype: str) -> Array:
    """A captured tensor."""

    def at(index: Index) -> Expr:
        return make("load", dtype, index, slot)

    array = Array(shape, dtype, at, wraps=(True,) * len(shape))
    array.captured = bool(shape)
    return array


def literal_array(values: Sequence[int | float | bool], shape: Sequence[int], dtype: str) -> Array:
    """A tensor of constants; an index that is not constant selects among all of them."""
    check_unroll(len(values))
    nodes = [const(value, dtype) for value in values]

    def at(index: Index) -> Expr:
        flat = _flatten(index, shape)
        if flat.op == "const":
            return nodes[int(flat.value or 0)]
        chosen = nodes[0]
        for i, node in enumerate(nodes[1:], start=1):
            chosen = make("where", dtype, (applied("eq", flat, integer(i)), node, chosen))
        return chosen

    return Array(shape, dtype, at)


def broadcast(array: Array, shape: Sequence[int]) -> Array:
    """An array of this shape whose missing and unit dimensions repeat."""
    if array.shape == tuple(shape):
        return array
    lead = len(shape) - len(array.shape)
    kept = [size == shape[lead + dim] for dim, size in enumerate(array.shape)]

    def at(index: Index) -> Expr:
        tail = index[lead:]
        return array.at(
            tuple(i if keep else integer(0) for i, keep in zip(tail, kept, strict=True))
        )

    return Array(shape, array.dtype, at, weak=array.weak)


def reshape(array: Array, shape: Sequence[int]) -> Array:
    """The same elements in row-major order under another shape."""
    shape = infer_size(tuple(shape), math.prod(array.shape))

    def at(index: Index) -> Expr:
        return array.at(_unflatten(_flatten(index, shape), array.shape))

    return Array(shape, array.dtype, at)


def index(array: Array, positions: Sequence[Array | None]) -> Array:
    """torch's advanced indexing by integer arrays; None leaves a dimension alone."""
    given = {dim: at for dim, at in enumerate(positions) if at is not None}
    if any(position.dtype in ("bool", "uint8") for position in given.values()):
        raise Refusal(
            "indexes by a boolean mask",
            "the result's size would depend on data",
            "choose with torch.where",
        )
    joint = torch.broadcast_shapes(*(position.shape for position in given.values()))
    parts = {dim: broadcast(position, joint) for dim, position in given.items()}
    rest = [dim for dim in range(len(array.shape)) if dim not in parts]
    # The dimensions of the positions stand where these do, or first if they are apart.
    first = min(parts) if max(parts) - min(parts) + 1 == len(parts) else 0
    last = first + len(joint)

    def at(index: Index) -> Expr:
        full = dict(zip(rest, index[:first] + index[last:], strict=True))
        for dim, part in parts.items():
            chosen = make("cast", "int64", (part.at(index[first:last]),))
            full[dim] = chosen if array.wraps[dim] else _wrapped(chosen, array.shape[dim])
        return array.at(tuple(full[dim] for dim in range(len(full))))

    sizes, wraps = [array.shape[dim] for dim in rest], [array.wraps[dim] for dim in rest]
    sizes[first:first], wraps[first:first] = joint, [False] * len(joint)
    return Array(sizes, array.dtype, at, wraps=wraps)


def _wrapped(index: Expr, size: int) -> Expr:
    if index.op == "const":
        return integer(int(index.value or 0) % max(size, 1))
    known = Intervals(_POSITIONS)(index)
    if known is not None and known[0] >= 0:
        return index
    wrapped = applied("add", index, integer(size))
    return applied("where", applied("lt", index, integer(0)), wrapped, index)


def _flatten(index: Index, shape: Sequence[int]) -> Expr:
    flat = integer(0)
    for i, size in zip(index, shape, strict=True):
        flat = applied("add", applied("mul", flat, integer(size)), i)
    return flat


def _unflatten(flat: Expr, shape: Sequence[int]) -> Index:
    index: list[Expr] = []
    for dim in reversed(range(len(shape))):
        size = integer(max(shape[dim], 1))
        last = dim == 0 or math.prod(shape[:dim]) == 1
        index.append(flat if last else applied("floor_mod", flat, size))
        flat = integer(0) if last else applied("floor_div", flat, size)
    return tuple(reversed(index))
