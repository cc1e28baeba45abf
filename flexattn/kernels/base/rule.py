"""Rules of feasibility as every family of kernels has them: a name, words, and what must hold.

They are stated in sympy (kernels/stated) and printed as Python, which is what a call asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flexattn.errors import ConfigError

_C = TypeVar("_C")
CaseT = TypeVar("CaseT")


@dataclass(frozen=True, slots=True)
class Rule(Generic[CaseT]):
    """One condition: a short name that reports count by, what to say where it is broken, and it.

    says: a format string over the names of a case's numbers and what `worded` is told beside them.
    """

    name: str
    says: str
    holds: Callable[[CaseT], bool]


@dataclass(frozen=True, slots=True)
class Rules(Generic[CaseT]):
    """The rules of one family.

    shape: those of a config's numbers alone. fit: those that are asked where these hold, and what
    the config takes is known. worth: those of configs that can run.
    """

    shape: tuple[Rule[CaseT], ...]
    fit: tuple[Rule[CaseT], ...]
    worth: tuple[Rule[CaseT], ...]

    def broken(self, case: CaseT, estimate: Callable[[CaseT], None]) -> list[Rule[CaseT]]:
        """The rules that a case breaks, in their order.

        estimate: writes into the case what its config takes, which may divide by its numbers.
        """
        found = [rule for rule in self.shape if not rule.holds(case)]
        if found:
            return found
        estimate(case)
        return [rule for rule in self.fit if not rule.holds(case)]


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


def violated(rules: Sequence[Rule[CaseT]], case: CaseT) -> list[Rule[CaseT]]:
    """Those of the rules that do not hold of a case."""
    return [rule for rule in rules if not rule.holds(case)]


def worded(rules: Iterable[Rule[Any]], case: Any, told: Mapping[str, object]) -> list[str]:
    """What broken rules say of a case, each thing once. told: what words name beside numbers."""
    known = _Names(case, told)
    return list(dict.fromkeys(rule.says.format_map(known) for rule in rules))


class _Names(dict[str, object]):
    """What words are told, and of a case what they ask for."""

    def __init__(self, case: object, told: Mapping[str, object]) -> None:
        super().__init__(told)
        self._case = case

    def __missing__(self, name: str) -> object:
        return getattr(self._case, name)
