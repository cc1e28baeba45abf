"""Which rules of feasibility a config breaks, and why, in microseconds.

space/stated says them as inequalities; what runs here is these, printed by sympy as plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexattn.device import Device
from flexattn.problem import Structure
from flexattn.space import printed
from flexattn.space.config import Config, describe
from flexattn.space.estimates import estimated
from flexattn.space.terms import numbers

__all__ = ["FIT", "RULES", "SHAPE", "WORTH", "Rule", "reasons", "unpromising", "violated"]


class Rule(NamedTuple):
    """One condition: a short name that reports count by, and what to say where it is broken.

    says: a format string over the symbols' names, and `device`, `arch` and `config`.
    """

    name: str
    says: str


# Those of the config's numbers alone, those that are asked where these hold, and those of configs
# that can run.
SHAPE, FIT, WORTH = (
    tuple(Rule(*each) for each in group) for group in (printed.SHAPE, printed.FIT, printed.WORTH)
)
RULES = (*SHAPE, *FIT)


def violated(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """The rules that a config breaks for a structure on a device, in their order.

    Where it breaks one of its numbers alone, the others are not asked.
    """
    values = numbers(config, structure, device)
    # The estimates divide by these numbers.
    found = _broken(SHAPE, printed.shape(values))
    return found or _broken(FIT, printed.fit((*values, *estimated(values))))


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    found = violated(config, structure, device)
    if not found:
        return []
    values = numbers(config, structure, device)
    known: dict[str, object] = dict(zip(printed.NAMES, values, strict=True))
    if found[0] not in SHAPE:
        known["shared_memory"], known["registers"] = estimated(values)
    known |= {"device": device.name, "arch": device.arch, "config": describe(config)}
    return list(dict.fromkeys(rule.says.format(**known) for rule in found))


def unpromising(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """Of a config that can run: why only an exhaustive search tries it."""
    values = numbers(config, structure, device)
    return _broken(WORTH, printed.worth((*values, *estimated(values))))


def _broken(rules: Sequence[Rule], held: Sequence[object]) -> list[Rule]:
    if all(held):
        return []
    return [rule for rule, holds in zip(rules, held, strict=True) if not holds]
