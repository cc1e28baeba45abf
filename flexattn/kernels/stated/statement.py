"""What feasibility is stated with: inequalities with their words, and formulas of named steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sympy import Basic, Symbol


@dataclass(frozen=True)
class Inequality:
    """One condition: a short name that reports count by, what must hold, and what to say.

    says: a format string over the symbols' names, and what the family's `reasons` tells beside
    them, as `device` or `config`.
    """

    name: str
    holds: Basic
    says: str


@dataclass(frozen=True)
class Step:
    """A value on the way to others, under a name of its own, and why it is what it is."""

    symbol: Symbol
    value: Basic
    why: str


@dataclass(frozen=True)
class Formula:
    """What a config takes: `value`, over a case's symbols and steps; a Tuple for several names."""

    names: tuple[str, ...]
    says: str
    value: Basic
    steps: tuple[Step, ...]


class Steps:
    """The named values of a module's formulas: `q_tile = let("q_tile", rows * columns)`.

    What comes after has them as symbols. So a formula stays as its author wrote it, a comparison
    with a Piecewise is one with a number (sympy took such a one for its first piece), and what is
    printed has the author's names.
    """

    def __init__(self) -> None:
        self._made: list[Step] = []

    def __call__(self, name: str, value: Any, why: str = "") -> Symbol:
        symbol = Symbol(name)
        self._made.append(Step(symbol, value, why))
        return symbol

    def formula(self, names: str, says: str, value: Any) -> Formula:
        """A formula over the steps so far, of one or more names with spaces between them."""
        return Formula(tuple(names.split()), says, value, tuple(self._made))


@dataclass(frozen=True)
class Statement:
    """All that is stated of one family.

    symbols: what a case has from the start. estimated: what is known of it once its config's own
    numbers are sound: what the formulas give, or the family's own code. shape, fit, worth:
    as in kernels/base/rule.py.
    """

    about: str
    symbols: tuple[Symbol, ...]
    fit: tuple[Inequality, ...]
    shape: tuple[Inequality, ...] = ()
    worth: tuple[Inequality, ...] = ()
    estimated: tuple[Symbol, ...] = ()
    formulas: tuple[Formula, ...] = ()
