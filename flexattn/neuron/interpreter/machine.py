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
    """One allocation. whole: its elements, partitions first where on chip.

    started: regions that a matmul began to accumulate in, as (offset, shape).
    """

    whole: torch.Tensor
    dtype: str
    buffer: str
    started: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def on_chip(self) -> bool:
        return self.buffer in _ON_CHIP

    @property
    def per_partition(self) -> int:
        """Elements of one partition on chip."""
        return prod(self.whole.shape[1:])

    @property
    def bytes(self) -> int:
        """For one partition; in PSUM whole banks."""
        used = self.per_partition * self.whole.itemsize
        return -(-used // BANK_BYTES) * BANK_BYTES if self.buffer == "psum" else used


@dataclass
class Machine:
    """One run of a kernel on a core.

    program: the core's number among the `programs` that run the kernel.
    instruction: the one that runs, which errors name.
    Allocations live to the end of the run: kernels here take all their memory at their start.
    """

    core: NeuronCore
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
        kind = NKI_DTYPES[dtype]
        poison = float("nan") if kind.is_floating_point else POISON_INT
        storage = Storage(torch.full(shape, poison, dtype=kind), dtype, buffer)
        if storage.on_chip:
            self._fit(storage)
        return storage

    def _fit(self, storage: Storage) -> None:
        shape, buffer = tuple(storage.whole.shape), storage.buffer
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
    """A result of nl.ndarray, or a view of one; data: the same elements as torch sees them."""

    __slots__ = ("data", "storage")

    def __init__(self, storage: Storage, data: torch.Tensor | None = None) -> None:
        self.storage, self.data = storage, storage.whole if data is None else data

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.numel()

    @property
    def offset(self) -> int:
        """The place of the first element in the allocation."""
        return int(self.data.storage_offset() - self.storage.whole.storage_offset())

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
        pairs = zip(self.shape[1:], self.data.stride()[1:], strict=True)
        return first, first + sum((size - 1) * stride for size, stride in pairs) + 1

    def banks(self) -> range:
        """The PSUM banks that it lies in, counted from the start of its allocation."""
        first, last = (each * self.data.itemsize for each in self.part())
        return range(first // BANK_BYTES, (last - 1) // BANK_BYTES + 1)

    def __getitem__(self, key: Any) -> Tensor:
        given = key if isinstance(key, tuple) else (key,)
        if len(given) > self.ndim:
            raise fault(
                f"{len(given)} indices of a view of {self.shape}", "at most one a dimension"
            )
        keys = [_inside(each, dim, self.shape) for dim, each in enumerate(given)]
        if self.storage.on_chip:
            # The partition dimension stays, and so does the last one where no other does.
            alone = len(keys) == self.ndim and not any(isinstance(k, slice) for k in keys[1:])
            for dim in {0, self.ndim - 1} if alone else {0}:
                if isinstance(place := keys[dim], int):
                    keys[dim] = slice(place, place + 1)
        data = self.data[tuple(keys)]
        return Tensor(self.storage, data if data.ndim else data[None])

    def ap(self, pattern: Sequence[Sequence[int]], offset: int | None = None) -> Tensor:
        """A view by [step, count] pairs over the allocation, whatever view it is called on."""
        start, whole = self.offset if offset is None else offset, self.storage.whole
        steps = [int(step) for step, _ in pattern]
        counts = [int(count) for _, count in pattern]
        if any(step < 0 for step in steps):
            raise fault(f"a pattern with steps {steps}", "this subset has no negative step")
        spans = [step * (count - 1) for step, count in zip(steps, counts, strict=True)]
        last = start + sum(spans)
        if start < 0 or last >= whole.numel() or any(count < 1 for count in counts):
            raise fault(f"elements {start} to {last} of {whole.numel()}", "a pattern stays inside")
        per = self.storage.per_partition
        if self.storage.on_chip and counts[0] > 1 and steps[0] != per:
            raise fault(f"a partition step of {steps[0]}", f"it is a partition's {per} elements")
        if self.storage.on_chip and start % per + sum(spans[1:]) >= per:
            raise fault("a pattern past the end of a partition", "partitions are apart")
        first = start + int(whole.storage_offset())
        return Tensor(self.storage, torch.as_strided(whole, counts, steps, first))

    def rows(self) -> torch.Tensor:
        """[partitions, elements of each] in float32, the precision that engines compute in."""
        return self.data.reshape(self.shape[0], -1).to(torch.float32)

    def put(self, values: torch.Tensor) -> None:
        """Write float32 or equal-typed values, converted once."""
        self.data.copy_(_cast(values, self.dtype).reshape(self.shape))


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


def _inside(key: Any, dim: int, shape: tuple[int, ...]) -> int | slice:
    """An index of a dimension; raises KernelError where it is none, or not inside."""
    size = shape[dim]
    if isinstance(key, bool) or not isinstance(key, int | slice):
        raise fault(f"the index {key!r}", "indices are integers and slices of integers")
    if isinstance(key, int):
        place = key + size if key < 0 else key
        if not 0 <= place < size:
            raise fault(f"index {key} in dimension {dim} of {shape}", "an index stays inside")
        return place
    first = 0 if key.start is None else key.start
    last = size if key.stop is None else key.stop
    step = 1 if key.step is None else key.step
    if not 0 <= first < last <= size or step < 1:
        raise fault(f"{first}:{last}:{step} in dimension {dim} of {shape}", "a slice stays inside")
    if dim == 0 and step != 1:
        raise fault(f"partitions {first}:{last}:{step}", "partitions are taken side by side")
    return slice(first, last, step)
