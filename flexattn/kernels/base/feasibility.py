"""Which rules of its family's feasibility a config breaks, and why, in microseconds.

kernels/stated says them as inequalities; what runs here is these, printed by sympy as Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import describe
from flexattn.kernels.base.rule import Rule, Rules, violated, worded
from flexattn.problem import Structure


class Feasibility:
    """A family's rules over a config, a structure and a device.

    case_of: what the rules' symbols stand for. estimate: writes into a case what its config takes.
    """

    def __init__(
        self,
        rules: Rules[Any],
        case_of: Callable[[Any, Structure, Device], Any],
        estimate: Callable[[Any], None],
    ) -> None:
        self.rules, self.case_of, self.estimate = rules, case_of, estimate

    def violated(self, config: Any, structure: Structure, device: Device) -> list[Rule[Any]]:
        """The rules that a config breaks for a structure on a device, in their order.

        Where it breaks one of its numbers alone, the others are not asked.
        """
        return self.rules.broken(self.case_of(config, structure, device), self.estimate)

    def reasons(self, config: Any, structure: Structure, device: Device) -> list[str]:
        """Why a config cannot run for a structure on a device; an empty list when it can."""
        case = self.case_of(config, structure, device)
        found = self.rules.broken(case, self.estimate)
        if not found:
            return []
        names = {"device": device.name, "arch": device.arch, "config": describe(config)}
        return worded(found, case, names)

    def unpromising(self, config: Any, structure: Structure, device: Device) -> list[Rule[Any]]:
        """Of a config that can run: why only an exhaustive search tries it."""
        return violated(self.rules.worth, self._estimated(config, structure, device))

    def resources(self, config: Any, structure: Structure, device: Device) -> tuple[int, int]:
        """Bytes of shared memory, and registers of one thread, before anything is compiled.

        The config must break no rule of its own numbers.
        """
        case = self._estimated(config, structure, device)
        return case.shared_memory, case.registers

    def _estimated(self, config: Any, structure: Structure, device: Device) -> Any:
        case = self.case_of(config, structure, device)
        self.estimate(case)
        return case
