"""Which rules of feasibility a config breaks, and why, in microseconds.

kernels/stated says them as inequalities; what runs here is these, printed by sympy as Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.config import describe
from flexattn.problem import Structure

__all__ = ["Feasibility", "Rule", "Rules"]


class Rule(NamedTuple):
    """One condition: a short name that reports count by, and what to say where it is broken.

    says: a format string over the symbols' names, and `device`, `arch` and `config`.
    """

    name: str
    says: str


class Rules(NamedTuple):
    """The conditions of one family's templates.

    shape: those of the config's numbers alone. fit: those that are asked where these hold, since
    the estimates divide by these numbers. worth: those of configs that can run. names: the symbols
    that the words may hold.
    """

    shape: tuple[Rule, ...]
    fit: tuple[Rule, ...]
    worth: tuple[Rule, ...]
    names: tuple[str, ...]


class Feasibility:
    """A family's rules over a config, a structure and a device.

    printed: the module that sympy printed of them. numbers: what its symbols stand for, in order.
    """

    def __init__(
        self, printed: ModuleType, numbers: Callable[[Any, Structure, Device], tuple[int, ...]]
    ) -> None:
        groups = (printed.SHAPE, printed.FIT, printed.WORTH)
        shape, fit, worth = (tuple(Rule(*each) for each in group) for group in groups)
        self.rules = Rules(shape, fit, worth, printed.NAMES)
        self.numbers = numbers
        self._printed = printed

    def violated(self, config: Any, structure: Structure, device: Device) -> list[Rule]:
        """The rules that a config breaks for a structure on a device, in their order.

        Where it breaks one of its numbers alone, the others are not asked.
        """
        values = self.numbers(config, structure, device)
        found = _broken(self.rules.shape, self._printed.shape(values))
        return found or _broken(
            self.rules.fit, self._printed.fit((*values, *self._estimated(values)))
        )

    def reasons(self, config: Any, structure: Structure, device: Device) -> list[str]:
        """Why a config cannot run for a structure on a device; an empty list when it can."""
        found = self.violated(config, structure, device)
        if not found:
            return []
        values = self.numbers(config, structure, device)
        words: dict[str, object] = dict(zip(self.rules.names, values, strict=True))
        if found[0] in self.rules.fit:
            words["shared_memory"], words["registers"] = self._estimated(values)
        words |= {"device": device.name, "arch": device.arch, "config": describe(config)}
        return list(dict.fromkeys(rule.says.format(**words) for rule in found))

    def unpromising(self, config: Any, structure: Structure, device: Device) -> list[Rule]:
        """Of a config that can run: why only an exhaustive search tries it."""
        values = self.numbers(config, structure, device)
        return _broken(self.rules.worth, self._printed.worth((*values, *self._estimated(values))))

    def resources(self, config: Any, structure: Structure, device: Device) -> tuple[int, int]:
        """Bytes of shared memory, and registers of one thread, before anything is compiled.

        The config must break no rule of its own numbers.
        """
        return self._estimated(self.numbers(config, structure, device))

    def _estimated(self, values: Sequence[int]) -> tuple[int, int]:
        shared, registers = self._printed.estimates(values)
        return int(shared), int(registers)


def _broken(rules: Sequence[Rule], held: Sequence[object]) -> list[Rule]:
    if all(held):
        return []
    return [rule for rule, holds in zip(rules, held, strict=True) if not holds]
