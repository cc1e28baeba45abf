"""Limits: which configs of a family can run for what, and why the others cannot.

Each family states its own in its `limits.py`, once, as Python that a person wrote: a ConfigCase,
whose properties are the numbers that follow from a config, a structure and a device, and rules
over it. A call asks them in microseconds. The same properties accept a number that is not known
yet: kernels/base/room.py asks how far one may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flexattn.errors import ConfigError
from flexattn.kernels.base.config import describe

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


@dataclass(frozen=True, slots=True)
class Limits(Generic[CaseT]):
    """The rules of one family.

    case_of: the case of a config, a structure (for serving a form) and a device.
    shape: rules of a config's numbers alone. fit: those that are asked where the first hold: what
    they compute may divide by these numbers. worth: those of configs that can run: one that breaks
    them is tried by an exhaustive search alone.
    """

    case_of: Callable[[Any, Any, Any], CaseT]
    shape: tuple[Rule[CaseT], ...]
    fit: tuple[Rule[CaseT], ...]
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
        """Why a config cannot run for a structure on a device; an empty list when it can."""
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


def is_power_of_two(size: int) -> bool:
    """Whether a size is a power of two, 1 among them."""
    return size >= 1 and size & (size - 1) == 0


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
