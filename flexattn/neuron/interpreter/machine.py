"""The machine that a kernel runs on: its memory, and views of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from flexattn.device.neuroncore import BANK_BYTES, PARTITIONS, PSUM_BANKS, NeuronCore
from flexattn.errors import KernelError

NKI_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_ON_CHIP = ("sbuf", "psum")
# What new memory holds, as in AWS's simulator: reading it before writing shows in the result.
POISON_INT = 4


def fault(got: str, rule: str) -> KernelError:
    """The error for a broken rule; raise it."""
    return KernelError(got, rule)


@dataclass(eq=False)
class Storage:
    """One allocation. shape: partitions first where on chip. data: flat; None where not computed.

    started: regions that a matmul began to accumulate in, as (offset, shape).
    """

    shape: tuple[int, ...]
    dtype: str
    buffer: str
    data: torch.Tensor | None
    started: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def on_chip(self) -> bool:
        return self.buffer in _ON_CHIP

    @property
    def itemsize(self) -> int:
        return NKI_DTYPES[self.dtype].itemsize

    @property
    def per_partition(self) -> int:
        """Elements of one partition on chip."""
        return prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        """For one partition; in PSUM whole banks."""
        used = self.per_partition * self.itemsize
        return -(-used // BANK_BYTES) * BANK_BYTES if self.buffer == "psum" else used


@dataclass
class Machine:
    """One run of a kernel on a core. numerics: values are computed, not only checked.

    program: the core's number among the `programs` that run the kernel.
    instruction: the one that runs, which errors name.
    Allocations live to the end of the run: kernels here take all their memory at their start.
    """

    core: NeuronCore
    numerics: bool = True
    program: int = 0
    programs: int = 1
    instruction: str = ""
    live: Counter[str] = field(default_factory=Counter)

    def allocate(self, shape: tuple[int, ...], dtype: str, buffer: str) -> Storage:
        """Poisoned memory; raises KernelError where it does not fit."""
        if dtype not in NKI_DTYPES:
            raise fault(f"a tensor of {dtype!r}", f"this subset has {', '.join(NKI_DTYPES)}")
        if any(size < 1 for size in shape):
            raise fault(f"a tensor of shape {shape}", "every size is at least 1")
        storage = Storage(shape, dtype, buffer, None)
        if storage.on_chip:
            self._fit(storage)
        if self.numerics:
            count = storage.per_partition * shape[0]
            kind = NKI_DTYPES[dtype]
            poison = float("nan") if kind.is_floating_point else POISON_INT
            storage.data = torch.full((count,), poison, dtype=kind)
        return storage

    def _fit(self, storage: Storage) -> None:
        shape, buffer = storage.shape, storage.buffer
        if len(shape) < 2 or len(shape) > 5:
            raise fault(f"a tile of shape {shape}", "tiles on chip have 2 to 5 dimensions")
        if shape[0] > PARTITIONS:
            raise fault(f"a tile of {shape[0]} partitions", f"there are {PARTITIONS}")
        self.live[buffer] += storage.bytes
        limit = self.core.sbuf_bytes if buffer == "sbuf" else PSUM_BANKS * BANK_BYTES
        if self.live[buffer] > limit:
            raise fault(
                f"{buffer}: {self.live[buffer]} bytes of a partition with a tile of {shape}",
                f"{self.core.name} has {limit}",
            )


_current: ContextVar[Machine | None] = ContextVar("flexattn_nki_machine", default=None)


def current_machine() -> Machine:
    """The machine of the kernel that runs; raises KernelError outside of one."""
    machine = _current.get()
    if machine is None:
        raise fault("an NKI instruction outside of a kernel", "kernels are run by interpret()")
    return machine


@contextmanager
def running(machine: Machine) -> Iterator[None]:
    """A block of code during which `current_machine()` is this machine."""
    token = _current.set(machine)
    try:
        yield
    finally:
        _current.reset(token)


_INT_RANGE = {
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 255),
}


class Tensor:
    """A result of nl.ndarray, or a view of one: shape, strides and offset in elements."""

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

    def part(self) -> tuple[int, int]:
        """The elements first..last-1 of a partition that hold all that it touches."""
        first = self.offset % self.storage.per_partition
        pairs = zip(self.shape[1:], self.strides[1:], strict=True)
        return first, first + sum((size - 1) * stride for size, stride in pairs) + 1

    def banks(self) -> range:
        """The PSUM banks that it lies in, counted from the start of its allocation."""
        first, last = (each * self.storage.itemsize for each in self.part())
        return range(first // BANK_BYTES, (last - 1) // BANK_BYTES + 1)

    def __getitem__(self, key: Any) -> Tensor:
        keys = list(key) if isinstance(key, tuple) else [key]
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
