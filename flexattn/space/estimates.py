"""What a config takes of its device before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.device import Device
from flexattn.problem import Structure
from flexattn.space import printed
from flexattn.space.config import Config
from flexattn.space.terms import numbers

__all__ = ["estimated", "estimates"]


def estimates(config: Config, structure: Structure, device: Device) -> tuple[int, int]:
    """Bytes of shared memory, and registers of one thread."""
    return estimated(numbers(config, structure, device))


def estimated(values: Sequence[int]) -> tuple[int, int]:
    """The estimates from a case's numbers, whose config must break no rule of its own."""
    shared, registers = printed.estimates(values)
    return int(shared), int(registers)
