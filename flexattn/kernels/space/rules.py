"""Which rules of feasibility a config breaks, and why, in microseconds.

space/stated says them as inequalities; what runs here is these, printed by sympy as plain Python.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from flexattn.device import Device
from flexattn.kernels.base import rule
from flexattn.kernels.base.rule import Rule
from flexattn.kernels.hopper import case as hopper
from flexattn.kernels.space import printed, printed_gluon
from flexattn.kernels.space.config import Config, GluonPrefillConfig, describe
from flexattn.kernels.space.estimates import case_of
from flexattn.problem import Structure

__all__ = ["GLUON", "TRITON", "AnyRule", "Rule", "reasons", "unpromising", "violated"]

AnyRule: TypeAlias = Rule[Any]
TRITON, GLUON = printed.RULES, printed_gluon.RULES


def violated(config: Config, structure: Structure, device: Device) -> list[AnyRule]:
    """The rules that a config breaks for a structure on a device, in their order.

    Where it breaks one of its numbers alone, the others are not asked.
    """
    return _asked(config, structure, device)[0]


def reasons(config: Config, structure: Structure, device: Device) -> list[str]:
    """Why a config cannot run for a structure on a device; an empty list when it can."""
    found, case = _asked(config, structure, device)
    if not found:
        return []
    told = {"device": device.name, "arch": device.arch, "config": describe(config)}
    return rule.worded(found, case, told)


def unpromising(config: Config, structure: Structure, device: Device) -> list[AnyRule]:
    """Of a config that can run: why only an exhaustive search tries it."""
    if isinstance(config, GluonPrefillConfig):
        theirs = hopper.case_of(config, structure, device)
        printed_gluon.estimate(theirs)
        return rule.violated(GLUON.worth, theirs)
    case = case_of(config, structure, device)
    printed.estimate(case)
    return rule.violated(TRITON.worth, case)


def _asked(
    config: Config, structure: Structure, device: Device
) -> tuple[list[AnyRule], printed.Case | printed_gluon.Case]:
    """The rules that a config breaks, and the numbers that it breaks them with."""
    if isinstance(config, GluonPrefillConfig):
        theirs = hopper.case_of(config, structure, device)
        return GLUON.broken(theirs, printed_gluon.estimate), theirs
    case = case_of(config, structure, device)
    return TRITON.broken(case, printed.estimate), case
