"""How many blocks of a kernel one SM holds, and which resource is spent first."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.device import KNOWN, Device
from flexattn.device.neuroncore import KIB
from flexattn.records.record import Trial

# CUDA programming guide, technical specifications per compute capability: most threads of an SM,
# its shared memory in KiB, and the most blocks.
_SM: dict[str, tuple[int, int, int]] = {
    "sm_80": (2048, 164, 32),
    "sm_86": (1536, 100, 16),
    "sm_89": (1536, 100, 24),
    "sm_90": (2048, 228, 32),
    "sm_100": (2048, 228, 32),
    "sm_120": (1536, 100, 24),
}
# What the driver keeps of each block's shared memory, and in which units a warp takes registers.
_RESERVED, _UNIT = KIB, 256


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one SM holds at once, and what would be lacking for another."""

    blocks: int
    limit: str


def recorded_device(name: str, arch: str) -> Device | None:
    """The device behind a record's environment: by name, else the first of its arch."""
    if name in KNOWN:
        return KNOWN[name]
    return next((device for device in KNOWN.values() if device.arch == arch), None)


def occupancy(trial: Trial, device: Device) -> Occupancy | None:
    """Blocks per SM of a built config; None for AMD, or where its registers are not recorded."""
    if device.arch not in _SM or not trial.registers:
        return None
    threads, shared, blocks = _SM[device.arch]
    size = trial.config.num_warps * device.warp_size
    warp = -(-trial.registers * device.warp_size // _UNIT) * _UNIT
    counts = {
        "registers": device.registers // warp // trial.config.num_warps,
        "shared memory": shared * KIB // (trial.shared_memory + _RESERVED),
        "threads": threads // size,
        "blocks": blocks,
    }
    least = min(counts, key=lambda name: counts[name])
    return Occupancy(counts[least], least)
