"""The machine that a kernel runs on: its memory, its rules, and when each instruction could start.

Every engine has a queue of its own and runs beside the others. An instruction starts when its
engine is free and the memory it touches is: what it reads has been written, what it overwrites has
been read and written. Memory is told apart by bytes of a partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod

import torch

from flexattn.device.neuroncore import BANK_BYTES, PARTITIONS, PSUM_BANKS, NeuronCore
from flexattn.errors import KernelError

NKI_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
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

    started: regions that a matmul began to accumulate in, as (offset, shape). spans: what the
    timeline knows of its parts.
    """

    shape: tuple[int, ...]
    dtype: str
    buffer: str
    data: torch.Tensor | None
    started: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)

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
        """Of one partition; in PSUM whole banks."""
        used = self.per_partition * self.itemsize
        return -(-used // BANK_BYTES) * BANK_BYTES if self.buffer == "psum" else used


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes first..last-1 of every partition of an allocation."""

    memory: Storage
    first: int
    last: int


@dataclass
class Timeline:
    """The clock of each engine, in nanoseconds from the start of the kernel.

    busy: what each engine spent on its instructions. end: when the last one is done.
    """

    free: dict[str, float] = field(default_factory=dict)
    busy: Counter[str] = field(default_factory=Counter)
    end: float = 0.0

    def issue(
        self,
        engines: Iterable[str],
        cost: float,
        latency: float,
        reads: Iterable[Span],
        writes: Iterable[Span],
    ) -> None:
        """An instruction that holds its engines for `cost` and is done `latency` after that."""
        engines = tuple(engines)
        start = max([self.free.get(engine, 0.0) for engine in engines], default=0.0)
        reads, writes = tuple(reads), tuple(writes)
        for span in reads:
            start = max(start, _latest(span, reading=True))
        for span in writes:
            start = max(start, _latest(span, reading=False))
        for engine in engines:
            self.free[engine] = start + cost
        if engines:
            self.busy[engines[0]] += cost  # type: ignore[assignment]
        done = start + cost + latency
        self.end = max(self.end, done)
        for span in reads:
            _mark(span, read=start + cost)
        for span in writes:
            _mark(span, written=done)


def _latest(span: Span, reading: bool) -> float:
    """When the bytes are ready: written for a reader, and read by everyone for a writer."""
    first, last = _parts(span)
    times = span.memory.times[first:last]
    if reading:
        return max((written for written, _ in times), default=0.0)
    return max((max(pair) for pair in times), default=0.0)


def _mark(span: Span, written: float | None = None, read: float | None = None) -> None:
    first, last = _parts(span)
    times = span.memory.times
    for index in range(first, last):
        before_written, before_read = times[index]
        if written is not None:
            times[index] = (written, before_read)
        elif read is not None and read > before_read:
            times[index] = (before_written, read)


def _parts(span: Span) -> tuple[int, int]:
    """The indices of the parts that the bytes are made of; parts are split at their ends."""
    memory = span.memory
    if not memory.cuts:
        memory.cuts += [span.first, span.last]
        memory.times.append((0.0, 0.0))
        return 0, 1
    for place in (span.first, span.last):
        index = bisect_left(memory.cuts, place)
        if index < len(memory.cuts) and memory.cuts[index] == place:
            continue
        insort(memory.cuts, place)
        if index == 0:
            memory.times.insert(0, (0.0, 0.0))
        elif index == len(memory.cuts) - 1:
            memory.times.append((0.0, 0.0))
        else:
            memory.times.insert(index, memory.times[index - 1])
    return bisect_left(memory.cuts, span.first), bisect_left(memory.cuts, span.last)


@dataclass
class Machine:
    """One run of a kernel on a core. numerics: values are computed, not only counted.

    instruction: the one that runs, which errors name.
    Allocations live to the end of the run: kernels here take all their memory at their start.
    """

    core: NeuronCore
    numerics: bool = True
    instruction: str = ""
    live: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    accumulators: dict[str, torch.Tensor | None] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)

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

    def count(self, instruction: str, amount: int = 1) -> None:
        self.counts[instruction] += amount


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
