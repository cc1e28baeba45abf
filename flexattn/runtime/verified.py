"""Kernels whose first launch was held to plain torch, by the hash of their source."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.source import Source
from flexattn.runtime.fallback.memory import memory
from flexattn.util.lru import Lru

# Of this process; what lasts is an Outcome, or lies beside an exported binary.
_known: Lru[tuple[str, str], bool] = Lru(8192)


def is_verified(source: Source, device: Device) -> bool:
    """Whether this process or an earlier one verified a kernel, by this compiler and driver."""
    key = source.hash, device.arch
    if _known.get(key):
        return True
    outcome = memory().find(source, device)
    if outcome is None or not outcome.verified:
        return False
    _known.put(key, True)
    return True


def trust(source: Source, device: Device) -> None:
    """Take a kernel for verified in this process."""
    _known.put((source.hash, device.arch), True)


def forget_verified() -> None:
    """Verify all kernels of this process anew that no file calls verified."""
    _known.clear()
