"""The machine that a kernel runs on: memory, views of it, operators, and rules of instructions.

[shared] is nki/api/nki.api.shared of the AWS Neuron documentation: its tables of math operators
and of activation functions with their valid input ranges.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, TypeVar

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


@dataclass(frozen=True, slots=True)
class Operator:
    """One nl.* operator on float32. unary: an activation function."""

    name: str
    function: Callable[..., torch.Tensor]
    unary: bool = False

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args).to(torch.float32)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _log(x: torch.Tensor) -> torch.Tensor:
    """Outside of the range in which the Scalar Engine's table holds [shared], NaN."""
    return torch.where((x >= 2.0**-64) & (x <= 2.0**64), torch.log(x), math.nan)


_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "power": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum,
    "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le,
    "greater": torch.gt, "greater_equal": torch.ge, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
}  # fmt: skip
_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "copy": torch.clone, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "exp": torch.exp, "sign": torch.sign, "log": _log,
}  # fmt: skip
OPERATORS: dict[str, Operator] = {
    **{name: Operator(name, each) for name, each in _BINARY.items()},
    **{name: Operator(name, each, unary=True) for name, each in _UNARY.items()},
}


Computed: TypeAlias = Callable[[], torch.Tensor]
_Instruction = TypeVar("_Instruction", bound=Callable[..., Computed])
# nki.isa: which partitions a view may start at, by how many it has.
_STARTS = ((32, (0, 32, 64, 96)), (64, (0, 64)), (128, (0,)))


def instruction(function: _Instruction) -> _Instruction:
    """An instruction in nki.isa: called by keyword, with tensors where it wants them.

    The function checks its operands and gives its value, which goes to `dst`. It writes `dst` and
    `reduce_res`, and reads all else.
    """
    name = function.__name__
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.annotation == "Tensor"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if args:
            raise fault(f"nisa.{name} with positional arguments", "name them all")
        for each in needed:
            if each in kwargs and not isinstance(kwargs[each], Tensor):
                raise fault(f"nisa.{name}: {each}={kwargs[each]!r}", "it is a tensor")
        machine = current_machine()
        machine.instruction = name
        if not name.startswith("dma_"):
            on_chip(*(each for each in kwargs.values() if isinstance(each, Tensor)))
        value = function(**kwargs)
        for written in (kwargs["dst"], kwargs.get("reduce_res")):
            if written is not None and written.buffer == "psum" and name != "nc_matmul":
                _forget(written)
        kwargs["dst"].put(value())

    return call  # type: ignore[return-value]


def check(holds: bool, got: str, rule: str) -> None:
    """Raise KernelError where the instruction that runs breaks a rule."""
    if not holds:
        raise fault(f"nisa.{current_machine().instruction}: {got}", rule)


def lies_in(buffer: str, *operands: Tensor) -> None:
    """These operands are in one memory alone."""
    for each in operands:
        check(each.buffer == buffer, f"an operand in {each.buffer}", f"it is in {buffer}")


def on_chip(*operands: Tensor) -> None:
    """Tiles of compute engines are in SBUF or PSUM and start at a partition they can reach."""
    for each in operands:
        check(
            each.storage.on_chip,
            f"an operand in {each.buffer}",
            "engines read and write SBUF and PSUM",
        )
        count, first = each.shape[0], each.first_partition
        starts = next(starts for most, starts in _STARTS if count <= most)
        got = f"{count} partitions from {first}"
        check(first in starts, got, f"so many start at one of {starts}")


def same(*tiles: Tensor) -> None:
    """Tiles agree in partitions and in elements of each."""
    shapes = {(tile.shape[0], tile.free) for tile in tiles}
    got = " and ".join(str(tile.shape) for tile in tiles)
    check(len(shapes) == 1, got, "operands have equal partitions and equal elements of each")


def operand(value: Any, data: Tensor) -> None:
    """A number, or a float32 column of one value for each partition of data."""
    if not isinstance(value, Tensor):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        check(plain, f"the operand {value!r}", "it is a number or a tile")
        return
    check(
        value.shape[0] == data.shape[0] and value.free == 1,
        f"an operand of shape {value.shape} for data of {data.shape}",
        "it has one element for each partition",
    )
    check(value.dtype == "float32", f"a {value.dtype} operand", "operands are float32")


def column(value: Any) -> torch.Tensor:
    """An operand's numbers, [partitions, 1] or one; numbers past float32's range are infinite."""
    if isinstance(value, Tensor):
        return value.rows()
    return torch.tensor(float(value), dtype=torch.float64).to(torch.float32)


def binary(op: Any) -> Operator:
    """The operator, if it takes two operands."""
    takes = isinstance(op, Operator) and not op.unary
    check(takes, f"op={op!r}", "it takes an operator of two operands")
    found: Operator = op
    return found


def engine_of(engine: Any, only: str) -> None:
    """The engine that is named, if one is, is the one that this subset runs an instruction on."""
    chosen = getattr(engine, "name", "unknown")
    check(chosen in ("unknown", only), f"engine {chosen}", f"it runs on {only}")


def _forget(written: Tensor) -> None:
    """Forget the matmul results that another instruction has overwritten: none may add to them."""
    storage, (first, last) = written.storage, written.part()

    def kept(offset: int, shape: tuple[int, ...]) -> bool:
        begin = offset % storage.per_partition
        return begin >= last or first >= begin + prod(shape[1:])

    storage.started = [each for each in storage.started if kept(*each)]
