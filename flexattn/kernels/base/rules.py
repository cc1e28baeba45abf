"""Which rules of feasibility a config breaks, and why, in microseconds.

space/stated says them as inequalities; what runs here is these, printed by sympy as plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.config import Config, GluonPrefillConfig, describe
from flexattn.kernels.base.estimates import estimated
from flexattn.kernels.base.features import numbers
from flexattn.kernels.hopper import printed as printed_gluon
from flexattn.kernels.triton import printed
from flexattn.kernels.triton.amd import known, limited
from flexattn.problem import Structure

__all__ = ["GLUON", "HINTS", "TRITON", "Rule", "Rules", "reasons", "unpromising", "violated"]


class Rule(NamedTuple):
    """One condition: a short name that reports count by, and what to say where it is broken.

    says: a format string over the symbols' names, and `device`, `arch` and `config`.
    """

    name: str
    says: str


class Rules(NamedTuple):
    """The conditions of one language's templates.

    shape: those of the config's numbers alone. fit: those that are asked where these hold. worth:
    those of configs that can run. names: the symbols that the words may hold.
    """

    shape: tuple[Rule, ...]
    fit: tuple[Rule, ...]
    worth: tuple[Rule, ...]
    names: tuple[str, ...]


def _rules(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(*each) for each in pairs)


TRITON = Rules(_rules(*printed.SHAPE), _rules(*printed.FIT), _rules(*printed.WORTH), printed.NAMES)
GLUON = Rules(
    _rules(*printed_gluon.SHAPE),
    _rules(*printed_gluon.FIT),
    _rules(*printed_gluon.WORTH),
    printed_gluon.NAMES,
)
# Of what AMD's compiler is told beside numbers, which no inequality says.
HINTS = Rule("hints", "the compiler for {arch} does not know the hints of {config}")


def violated(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """The rules that a config breaks for a structure on a device, in their order.

    Where it breaks one of its numbers alone, the others are not asked.
    """
    if not known(config, device):
        return [HINTS]
    values = numbers(config, structure, limited(device, config))
    if isinstance(config, GluonPrefillConfig):
        found = _broken(GLUON.shape, printed_gluon.shape(values))
        return found or _broken(
            GLUON.fit, printed_gluon.fit((*values, *estimated(config, values)))
        )
    # The estimates divide by these numbers.
    found = _broken(TRITON.shape, printed.shape(values))
    return found or _broken(TRITON.fit, printed.fit((*values, *estimated(config, values))))


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    found = violated(config, structure, device)
    if not found:
        return []
    rules = GLUON if isinstance(config, GluonPrefillConfig) else TRITON
    values = numbers(config, structure, limited(device, config))
    told: dict[str, object] = dict(zip(rules.names, values, strict=True))
    if found[0] not in (*rules.shape, HINTS):
        told["shared_memory"], told["registers"] = estimated(config, values)
    told |= {"device": device.name, "arch": device.arch, "config": describe(config)}
    return list(dict.fromkeys(rule.says.format(**told) for rule in found))


def unpromising(config: Config, structure: Structure, device: Device) -> list[Rule]:
    """Of a config that can run: why only an exhaustive search tries it."""
    values = numbers(config, structure, limited(device, config))
    values = (*values, *estimated(config, values))
    if isinstance(config, GluonPrefillConfig):
        return _broken(GLUON.worth, printed_gluon.worth(values))
    return _broken(TRITON.worth, printed.worth(values))


def _broken(rules: Sequence[Rule], held: Sequence[object]) -> list[Rule]:
    if all(held):
        return []
    return [rule for rule, holds in zip(rules, held, strict=True) if not holds]
