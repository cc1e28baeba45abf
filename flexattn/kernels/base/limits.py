"""Limits: which configs of a family can run, why the others cannot, and how far a number may go.

Each family states its own, once, as Python that a person wrote: a ConfigCase, whose properties are
the numbers that follow from a config, a structure and a device, and rules over it. A call asks
them in microseconds.

The same properties accept a _Traced for one number: they then compute an expression of it beside
the number. So what a config takes is known as a formula, which `explain` tells with the largest
number that breaks no rule. No call asks: to import sympy takes long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import floor
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import describe, padded
from flexattn.kernels.base.features import tma_layout
from flexattn.problem import Structure

_C = TypeVar("_C")
CaseT = TypeVar("CaseT", bound="_Case")


class _Case(Protocol):
    @property
    def config(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rule(Generic[CaseT]):
    """One condition: a short name that reports count by, the words for where it is broken, and it.

    says: a format string over the case, `c`, and its config in words, `config`.
    """

    name: str
    says: str
    holds: Callable[[CaseT], bool]


SHARED_MEMORY: Rule[Any] = Rule(
    "shared memory",
    "shared memory: about {c.shared_memory} bytes, {c.device.name} has {c.device.shared_memory}",
    lambda c: c.shared_memory <= c.device.shared_memory,
)


@dataclass(frozen=True, slots=True)
class Limits(Generic[CaseT]):
    """The rules of one family.

    case_of: the case of a config, a structure (for serving a form) and a device.
    shape: rules of a config's numbers alone. fit: those that are asked where the first hold: what
    they compute may divide by these numbers. worth: those of configs that can run: one that breaks
    them is tried by an exhaustive search alone.
    """

    case_of: Callable[[Any, Any, Any], CaseT]
    fit: tuple[Rule[CaseT], ...]
    shape: tuple[Rule[CaseT], ...] = ()
    worth: tuple[Rule[CaseT], ...] = ()

    def broken(self, case: CaseT) -> list[Rule[CaseT]]:
        """The rules that a case breaks, in their order."""
        found = [rule for rule in self.shape if not rule.holds(case)]
        return found or [rule for rule in self.fit if not rule.holds(case)]

    def said(self, case: CaseT) -> list[str]:
        """The messages of the rules that a case breaks, each once."""
        found = self.broken(case)
        if not found:
            return []
        config = describe(case.config)
        return list(dict.fromkeys(rule.says.format(c=case, config=config) for rule in found))

    def violated(self, config: Any, structure: Any, device: Any) -> list[Rule[CaseT]]:
        """The rules that a config breaks for a structure on a device, in their order."""
        return self.broken(self.case_of(config, structure, device))

    def reasons(self, config: Any, structure: Any, device: Any) -> list[str]:
        """The reasons why a config cannot run for a structure on a device; empty when it can."""
        return self.said(self.case_of(config, structure, device))

    def unpromising(self, config: Any, structure: Any, device: Any) -> list[Rule[CaseT]]:
        """The rules by which only an exhaustive search tries a config that can run."""
        case = self.case_of(config, structure, device)
        return [rule for rule in self.worth if not rule.holds(case)]

    def resources(self, config: Any, structure: Any, device: Any) -> tuple[int, int]:
        """Bytes of shared memory, and registers of one thread, before anything is compiled.

        The config must break no rule of its own numbers.
        """
        case: Any = self.case_of(config, structure, device)
        return case.shared_memory, case.registers


@dataclass(eq=False)
class StructureCase(Generic[_C]):
    """A config for a structure on a device."""

    config: _C
    structure: Structure
    device: Device

    @cached_property
    def qk_padded(self) -> int:
        """Columns of Q and K as tiles hold them."""
        return padded(self.structure.head_dim_qk)

    @cached_property
    def v_padded(self) -> int:
        """Columns of V as tiles hold them."""
        return padded(self.structure.head_dim_v)


def is_power_of_two(size: int) -> bool:
    """True if a size is a power of two, 1 among them."""
    return size >= 1 and size & (size - 1) == 0


# More than any tile that fits, so that what limits compute of one stays a small number.
LARGEST_TILE = 2**16


def power_of_two(name: str) -> Rule[Any]:
    """The rule of a tile's size, which the matrix instructions and Triton's ranges ask for."""

    def holds(c: Any) -> bool:
        size = getattr(c.config, name)
        return 16 <= size <= LARGEST_TILE and is_power_of_two(size)

    says = f"{name}={{c.config.{name}}} is not a power of two of at least 16"
    return Rule("power of two", says, holds)


KEYS_OF_BLOCK: Rule[Any] = Rule(
    "mask block",
    "BLOCK_N={c.config.BLOCK_N} does not divide the mask's block of "
    "{c.structure.sparsity.kv_block}",
    lambda c: (
        c.structure.sparsity is None or c.structure.sparsity.kv_block % c.config.BLOCK_N == 0
    ),
)
TMA_LAYOUT: Rule[Any] = Rule(
    "tma",
    "q, k, v must have inner stride 1, the rest multiples of 16 bytes",
    lambda c: tma_layout(c.structure),
)
NUM_WARPS: Rule[Any] = Rule(
    "warps",
    "num_warps={c.config.num_warps} is not one of 1, 2, 4, 8, 16",
    lambda c: c.config.num_warps in (1, 2, 4, 8, 16),
)
NUM_STAGES: Rule[Any] = Rule(
    "stages",
    "num_stages={c.config.num_stages} is not between 1 and 8",
    lambda c: 1 <= c.config.num_stages <= 8,
)


def able(
    configs: Iterable[_C], reasons: Callable[[_C], list[str]], what: str, do: str
) -> Iterator[_C]:
    """The configs that can run, each once; where none can, ConfigError says why of the last four.

    what: that no config fits it, in words. do: what to try instead.
    """
    refused, found = [], False
    for config in dict.fromkeys(configs):
        why = reasons(config)
        if why:
            refused.append(f"{config}: {'; '.join(why)}")
        else:
            found = True
            yield config
    if not found:
        raise ConfigError(what, "\n        ".join(refused[-4:]), do)


_T = TypeVar("_T")

# The numbers whose room is found, and what they may be.
VARIED: dict[str, tuple[int, ...]] = {
    "num_stages": tuple(range(1, 9)),
    "BLOCK_N": (16, 32, 64, 128, 256),
}


class Room(NamedTuple):
    """The largest value of one number of a config while the others stay.

    largest: with which no rule is broken. formula: bytes of shared memory, of the number.
    """

    name: str
    value: int
    largest: int
    formula: str
    available: int

    def __str__(self) -> str:
        return (
            f"{self.name}={self.value}, {self.largest} at most: {self.formula} of "
            f"{self.available} bytes of shared memory"
        )


class _Traced:
    """A number, and the expression of sympy that makes it of the one that is asked for.

    Arithmetic goes on with both; the number alone says whether a comparison holds.
    """

    def __init__(self, number: Any, made: Any) -> None:
        self.number, self.made = number, made

    __hash__ = object.__hash__

    def __floor__(self) -> _Traced:
        import sympy

        return _Traced(floor(self.number), sympy.floor(self.made))


def _number(value: Any) -> Any:
    return value.number if isinstance(value, _Traced) else value


def _made(value: Any) -> Any:
    return value.made if isinstance(value, _Traced) else value


def _computed(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], _Traced]:
    return lambda one, two: _Traced(
        compute(_number(one), _number(two)), compute(_made(one), _made(two))
    )


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[_Traced, Any], bool]:
    return lambda one, two: bool(compare(one.number, _number(two)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    _method = _computed(getattr(operator, _name))
    setattr(_Traced, f"__{_name}__", _method)
    setattr(_Traced, f"__r{_name}__", lambda two, one, made=_method: made(one, two))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Traced, f"__{_name}__", _compared(getattr(operator, _name)))


def rooms(limits: Limits[Any], config: Any, structure: Any, device: Any) -> tuple[Room, ...]:
    """The room of each number of VARIED that a config has, which breaks no rule itself."""
    names = {field.name for field in fields(config)}
    case = limits.case_of(config, structure, device)
    return tuple(_room(limits, case, name) for name in VARIED if name in names)


def _room(limits: Limits[Any], case: Any, name: str) -> Room:
    import sympy

    def of(number: Any) -> Any:
        return replace(case, config=replace(case.config, **{name: number}))

    value = getattr(case.config, name)
    largest = max(each for each in {*VARIED[name], value} if not limits.broken(of(each)))
    symbol = sympy.Symbol(name, integer=True, positive=True)
    taken = _made(of(_Traced(value, symbol)).shared_memory)
    return Room(name, value, largest, str(sympy.expand(taken)), case.device.shared_memory)
