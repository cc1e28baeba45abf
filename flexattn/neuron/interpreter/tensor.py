"""Tensor: a strided view of an allocation, with the view operations of NkiTensor that are used."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from flexattn.device.neuroncore import BANK_BYTES
from flexattn.neuron.interpreter.machine import NKI_DTYPES, Span, Storage, fault

_INT_RANGE = {
    "int32": (-(2**31), 2**31 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int8": (-128, 127),
    "uint8": (0, 255),
}


class Tensor:
    """What nl.ndarray returns, and every view of it: shape, strides and offset in elements."""

    __slots__ = ("offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int = 0,
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = tuple(shape), tuple(strides)

    @classmethod
    def whole(cls, storage: Storage) -> Tensor:
        """The view of all of an allocation."""
        return cls(storage, storage.shape, _dense(storage.shape))

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def free(self) -> int:
        """Elements of each partition."""
        return self.size // self.shape[0]

    @property
    def first_partition(self) -> int:
        return self.offset // self.storage.per_partition

    def span(self) -> Span:
        """The bytes of a partition that it touches; all that lies between them counts."""
        first = self.offset % self.storage.per_partition
        pairs = zip(self.shape[1:], self.strides[1:], strict=True)
        last = first + sum((size - 1) * abs(stride) for size, stride in pairs) + 1
        return Span(self.storage, first * self.storage.itemsize, last * self.storage.itemsize)

    def banks(self) -> range:
        """The PSUM banks that it lies in, counted from the start of its allocation."""
        span = self.span()
        return range(span.first // BANK_BYTES, (span.last - 1) // BANK_BYTES + 1)

    def __getitem__(self, key: Any) -> Tensor:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise fault(
                f"{len(keys)} indices of a view of {self.shape}", "at most one a dimension"
            )
        keys += [slice(None)] * (self.ndim - len(keys))
        offset, shape, strides = self.offset, [], []
        dims = zip(keys, self.shape, self.strides, strict=True)
        for dim, (one, size, stride) in enumerate(dims):
            first, count, step, kept = _range(one, size, dim, self.shape)
            offset += first * stride
            # The partition dimension stays, and so does a last dimension on chip.
            if kept or (self.storage.on_chip and (dim == 0 or self._drops_too_many(keys, dim))):
                shape.append(count)
                strides.append(stride * step)
        if not shape:
            shape, strides = [1], [1]
        return Tensor(self.storage, shape, strides, offset)

    def _drops_too_many(self, keys: list[Any], dim: int) -> bool:
        return dim == self.ndim - 1 and not any(isinstance(each, slice) for each in keys[1:])

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in other dimensions; raises KernelError where that is no view."""
        self._check_contiguous("reshape")
        moved = Tensor(self.storage, shape, _dense(shape), self.offset)
        if moved.size != self.size or (self.storage.on_chip and shape[0] != self.shape[0]):
            raise fault(f"{self.shape} reshaped to {tuple(shape)}", "partitions and sizes stay")
        return moved

    def permute(self, dims: Sequence[int]) -> Tensor:
        """The same elements with their dimensions in another order; partitions stay first."""
        if sorted(dims) != list(range(self.ndim)) or (self.storage.on_chip and dims[0] != 0):
            raise fault(f"permute({tuple(dims)}) of {self.shape}", "partitions stay first")
        shape, strides = ([each[dim] for dim in dims] for each in (self.shape, self.strides))
        return Tensor(self.storage, shape, strides, self.offset)

    def broadcast(self, dim: int, size: int) -> Tensor:
        """A dimension of size 1 as `size` times the same element."""
        if not 0 < dim < self.ndim or self.shape[dim] != 1:
            raise fault(
                f"broadcast({dim}, {size}) of {self.shape}", "a free dimension of size 1 repeats"
            )
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return Tensor(self.storage, shape, strides, self.offset)

    def _check_contiguous(self, what: str) -> None:
        expected = 1
        for size, stride in reversed(list(zip(self.shape, self.strides, strict=True))):
            if size != 1 and stride != expected:
                raise fault(f"{what} of a view with gaps", "its elements lie side by side")
            expected *= size

    def ap(self, pattern: Sequence[Sequence[int]], offset: int | None = None) -> Tensor:
        """A view by [step, count] pairs over the allocation, whatever view it is called on."""
        start = self.offset if offset is None else offset
        steps = [int(step) for step, _ in pattern]
        counts = [int(count) for _, count in pattern]
        if any(step < 0 for step in steps):
            raise fault(f"a pattern with steps {steps}", "this subset has no negative step")
        whole = self.storage.per_partition * self.storage.shape[0]
        last = start + sum(s * (c - 1) for s, c in zip(steps, counts, strict=True))
        if start < 0 or last >= whole or any(count < 1 for count in counts):
            raise fault(f"elements {start} to {last} of {whole}", "a pattern stays inside")
        if self.storage.on_chip and counts[0] > 1 and steps[0] != self.storage.per_partition:
            raise fault(
                f"a partition step of {steps[0]}",
                f"it is a partition's {self.storage.per_partition} elements",
            )
        if self.storage.on_chip:
            per = self.storage.per_partition
            reach = start % per + sum(
                s * (c - 1) for s, c in zip(steps[1:], counts[1:], strict=True)
            )
            if reach >= per:
                raise fault("a pattern past the end of a partition", "partitions are apart")
        return Tensor(self.storage, counts, steps, start)

    def array(self) -> torch.Tensor:
        """The elements, sharing memory with the allocation."""
        assert self.storage.data is not None
        return torch.as_strided(self.storage.data, self.shape, self.strides, self.offset)

    def rows(self) -> torch.Tensor:
        """[partitions, elements of each] in float32, the precision that engines compute in."""
        return self.array().reshape(self.shape[0], -1).to(torch.float32)

    def put(self, values: torch.Tensor) -> None:
        """Write float32 or equal-typed values, converted once."""
        self.array().copy_(_cast(values, self.dtype).reshape(self.shape))


def _dense(shape: Sequence[int]) -> list[int]:
    """Strides of elements that lie side by side."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """A conversion as the engines do it: to integers the nearest, ties to even, saturating."""
    kind = NKI_DTYPES[dtype]
    if values.dtype == kind:
        return values
    if kind.is_floating_point or not values.dtype.is_floating_point:
        return values.to(kind)
    low, high = _INT_RANGE[dtype]
    rounded = values.to(torch.float64).round().nan_to_num(nan=0.0, posinf=high, neginf=low)
    return rounded.clamp(low, high).to(torch.int64).to(kind)


def _range(key: Any, size: int, dim: int, shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """(first, count, step, whether the dimension stays) of one index of a dimension."""
    if isinstance(key, bool) or not isinstance(key, int | slice):
        raise fault(f"the index {key!r}", "indices are integers and slices of integers")
    if isinstance(key, int):
        place = key + size if key < 0 else key
        if not 0 <= place < size:
            raise fault(f"index {key} in dimension {dim} of {shape}", "an index stays inside")
        return place, 1, 1, False
    first = 0 if key.start is None else key.start
    last = size if key.stop is None else key.stop
    step = 1 if key.step is None else key.step
    if not 0 <= first < last <= size or step < 1:
        raise fault(f"{first}:{last}:{step} in dimension {dim} of {shape}", "a slice stays inside")
    if dim == 0 and step != 1:
        raise fault(f"partitions {first}:{last}:{step}", "partitions are taken side by side")
    return first, -(-(last - first) // step), step, True
