"""The machine that a kernel runs on: what it has allocated, what it has issued, and its rules."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from flexattn.device.neuroncore import BANK_BYTES, PARTITIONS, PSUM_BANKS, NeuronCore
from flexattn.errors import KernelError
from flexattn.neuron.nki.timeline import Timeline

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


class running:
    """A block of code during which `current()` is this machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __enter__(self) -> Machine:
        self.token = _current.set(self.machine)
        return self.machine

    def __exit__(self, *error: Any) -> None:
        _current.reset(self.token)
