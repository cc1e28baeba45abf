"""Rules that instructions share: operators, and checks of operands and shapes.

[shared] is nki/api/nki.api.shared of the AWS Neuron documentation: its tables of math operators
and of activation functions with their valid input ranges.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor as Array

from flexattn.neuron.interpreter.machine import Tensor, current_machine, fault


@dataclass(frozen=True, slots=True)
class Operator:
    """One nl.* operator on float32. unary: an activation function."""

    name: str
    function: Callable[..., Array]
    unary: bool = False

    def __call__(self, *args: Array) -> Array:
        return self.function(*args).to(torch.float32)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _log(x: Array) -> Array:
    """Outside of the range in which the Scalar Engine's table holds [shared], NaN."""
    return torch.where((x >= 2.0**-64) & (x <= 2.0**64), torch.log(x), math.nan)


_BINARY: dict[str, Callable[..., Array]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "power": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum,
    "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le,
    "greater": torch.gt, "greater_equal": torch.ge, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Array]] = {
    "copy": torch.clone, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf,
    "exp": torch.exp, "sign": torch.sign, "log": _log,
}  # fmt: skip
OPERATORS: dict[str, Operator] = {
    **{name: Operator(name, each) for name, each in _BINARY.items()},
    **{name: Operator(name, each, unary=True) for name, each in _UNARY.items()},
}


Computed: TypeAlias = Callable[[], Array]
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


def column(value: Any) -> Array:
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
