"""Room: how far one number of a config may go, by its family's limits over a symbol of sympy.

A case's properties and rules are Python over numbers. Given an _Unknown for one of them they
compute an expression of it; where Python asks whether a comparison holds, both answers are
followed. So what a config takes is known as a formula, and where the rules hold as a condition.
`explain` tells both. No call asks: to import sympy takes long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from flexattn.kernels.base.limits import Limits

_T = TypeVar("_T")

# The numbers that are asked for, and what they may be.
ASKED: dict[str, tuple[int, ...]] = {
    "num_stages": tuple(range(1, 9)),
    "BLOCK_N": (16, 32, 64, 128, 256),
}


@dataclass(frozen=True, slots=True)
class Room:
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


class _Unknown:
    """A number that is not known: an expression, and who decides whether its comparisons hold."""

    def __init__(self, value: Any, decide: Callable[[Any], bool]) -> None:
        self.value, self.decide = value, decide

    __hash__ = object.__hash__

    def __floor__(self) -> _Unknown:
        import sympy

        return _Unknown(sympy.floor(self.value), self.decide)

    def __eq__(self, other: object) -> bool:
        import sympy

        return self.decide(sympy.Eq(self.value, _plain(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _plain(number: Any) -> Any:
    return number.value if isinstance(number, _Unknown) else number


def _computed(compute: Callable[[Any, Any], Any], turned: bool) -> Callable[[_Unknown, Any], Any]:
    def method(self: _Unknown, other: Any) -> _Unknown:
        one, two = self.value, _plain(other)
        return _Unknown(compute(two, one) if turned else compute(one, two), self.decide)

    return method


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[_Unknown, Any], bool]:
    return lambda self, other: self.decide(compare(self.value, _plain(other)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(_Unknown, f"__{_name}__", _computed(getattr(operator, _name), turned=False))
    setattr(_Unknown, f"__r{_name}__", _computed(getattr(operator, _name), turned=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(_Unknown, f"__{_name}__", _compared(getattr(operator, _name)))


def _followed(ask: Callable[[_Unknown], _T], symbol: Any) -> Iterator[tuple[Any, _T]]:
    """The results of a function of an unknown number, each with its condition."""
    import sympy

    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        begun = waiting.pop()
        held: list[tuple[Any, bool]] = []

        def decide(relation: Any, begun: Any = begun, held: Any = held) -> bool:
            if relation in (sympy.true, sympy.false):
                return bool(relation)
            known = len(held) < len(begun)
            truth: bool = begun[len(held)] if known else True
            if not known:
                waiting.append((*(each for _, each in held), False))
            held.append((relation, truth))
            return truth

        answer = ask(_Unknown(symbol, decide))
        yield sympy.And(*(each if truth else sympy.Not(each) for each, truth in held)), answer


def rooms(limits: Limits[Any], config: Any, structure: Any, device: Any) -> tuple[Room, ...]:
    """The room of each number of ASKED that a config has, which breaks no rule itself."""
    names = {field.name for field in fields(config)}
    case = limits.case_of(config, structure, device)
    return tuple(_room(limits, case, name) for name in ASKED if name in names)


def _room(limits: Limits[Any], case: Any, name: str) -> Room:
    import sympy

    symbol, value = sympy.Symbol(name, integer=True, positive=True), getattr(case.config, name)

    def ask(unknown: _Unknown) -> Any:
        asked = replace(case, config=replace(case.config, **{name: unknown}))
        holds = all(rule.holds(asked) for rule in (*limits.shape, *limits.fit))
        return _plain(asked.shared_memory) if holds else None

    able = [(where, memory) for where, memory in _followed(ask, symbol) if memory is not None]
    found = {
        each: memory
        for where, memory in able
        for each in {*ASKED[name], value}
        if where.subs(symbol, each) == sympy.true
    }
    formula = str(sympy.expand(found[value]))
    return Room(name, value, max(found), formula, case.device.shared_memory)
