"""What a config takes of its device before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.device import Device
from flexattn.kernels.base.config import Config, GluonPrefillConfig
from flexattn.kernels.base.features import numbers
from flexattn.kernels.hopper import printed as printed_gluon
from flexattn.kernels.triton import printed
from flexattn.problem import Structure

__all__ = ["estimated", "estimates"]


def estimates(config: Config, structure: Structure, device: Device) -> tuple[int, int]:
    """Bytes of shared memory, and registers of one thread."""
    return estimated(config, numbers(config, structure, device))


def estimated(config: Config, values: Sequence[int]) -> tuple[int, int]:
    """The estimates from a case's numbers, whose config must break no rule of its own."""
    module = printed_gluon if isinstance(config, GluonPrefillConfig) else printed
    shared, registers = module.estimates(values)
    return int(shared), int(registers)
