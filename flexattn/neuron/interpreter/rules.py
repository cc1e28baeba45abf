"""Checks that instructions share: where operands may be, how they must fit, and how they issue."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import torch

from flexattn.neuron.interpreter import costs
from flexattn.neuron.interpreter.machine import Machine, current_machine, fault
from flexattn.neuron.interpreter.operators import Operator
from flexattn.neuron.interpreter.tensor import Tensor

# The instructions of nki.isa by name, as a kernel calls them.
ISA: dict[str, Callable[..., None]] = {}
_Instruction = TypeVar("_Instruction", bound=Callable[..., None])
# nki.isa: which partitions a view may start at, by how many it has.
_STARTS = ((32, (0, 32, 64, 96)), (64, (0, 64)), (128, (0,)))
_CLOCK = {
    "tensor": "tensor_ghz", "vector": "vector_ghz", "scalar": "scalar_ghz", "gpsimd": "gpsimd_ghz",
}  # fmt: skip


def instruction(function: _Instruction) -> _Instruction:
    """Put an instruction into ISA: called by keyword, with tensors where it wants them."""
    name = function.__name__
    needed = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.annotation == "Tensor"
    ]

    def call(*args: Any, **kwargs: Any) -> None:
        if args:
            raise fault(f"nisa.{name} with positional arguments", "name them all")
        for each in needed:
            if each in kwargs and not isinstance(kwargs[each], Tensor):
                raise fault(f"nisa.{name}: {each}={kwargs[each]!r}", "it is a tensor")
        kwargs.pop("name", None)  # every instruction has one, for profilers
        current_machine().instruction = name
        function(**kwargs)

    ISA[name] = call
    return function


def check(holds: bool, got: str, rule: str) -> None:
    """Raise KernelError where the instruction that runs breaks a rule."""
    if not holds:
        raise fault(f"nisa.{current_machine().instruction}: {got}", rule)


def on_chip(*operands: Any, only: str = "") -> None:
    """Tiles of compute engines are in SBUF or PSUM and start at a partition they can reach."""
    for each in operands:
        if not isinstance(each, Tensor):
            continue
        check(
            each.storage.on_chip,
            f"an operand in {each.buffer}",
            "engines read and write SBUF and PSUM",
        )
        if only:
            check(each.buffer == only, f"an operand in {each.buffer}", f"it is in {only}")
        starts = next(starts for most, starts in _STARTS if each.shape[0] <= most)
        check(
            each.first_partition in starts,
            f"{each.shape[0]} partitions from {each.first_partition}",
            f"so many start at one of {starts}",
        )


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


def engine_of(engine: Any, allowed: tuple[str, ...]) -> str:
    """The engine that runs an instruction: the first allowed one where none is named."""
    chosen = getattr(engine, "name", "unknown")
    if chosen == "unknown":
        return allowed[0]
    check(chosen in allowed, f"engine {chosen}", f"it runs on {', '.join(allowed)}")
    return str(chosen)


def issue(engine: str, cycles: float, reads: tuple[Any, ...], writes: tuple[Any, ...]) -> Machine:
    """Count an instruction of a compute engine and place it on the timeline."""
    machine = current_machine()
    core = machine.core
    machine.counts[machine.instruction] += 1
    machine.counts[f"{engine} instructions"] += 1
    inputs = [each for each in reads if isinstance(each, Tensor)]
    outputs = [each for each in writes if isinstance(each, Tensor)]
    engines = [engine]
    if core.has_shared_ports:
        buffers = {each.buffer for each in (*inputs, *outputs)}
        if engine in ("vector", "gpsimd") and "sbuf" in buffers:
            engines.append("vector or gpsimd at sbuf")
        if engine in ("vector", "scalar") and "psum" in buffers:
            engines.append("vector or scalar at psum")
    clock: float = getattr(core, _CLOCK[engine])
    latency = (costs.MIN_II if engine == "tensor" else costs.DEPENDENCY) / clock
    machine.timeline.issue(
        engines,
        cycles / clock,
        0.0 if engine == "gpsimd" else latency,
        [each.span() for each in inputs],
        [each.span() for each in outputs],
    )
    for each in outputs:
        if each.buffer == "psum" and machine.instruction != "nc_matmul":
            _forget(each)
    return machine


def _forget(written: Tensor) -> None:
    """What another instruction wrote is no matmul's to accumulate onto."""
    storage, span = written.storage, written.span()
    storage.started = [
        (offset, shape)
        for offset, shape in storage.started
        if not _overlaps(storage, offset, shape, span.first, span.last)
    ]


def _overlaps(storage: Any, offset: int, shape: tuple[int, ...], first: int, last: int) -> bool:
    begin = offset % storage.per_partition * storage.itemsize
    return bool(begin < last and first < begin + prod(shape[1:]) * storage.itemsize)
