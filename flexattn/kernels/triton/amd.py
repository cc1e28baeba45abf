"""Configs for AMD's GPUs: those of the Triton templates, with hints to AMD's compiler.

They stand apart from triton/config.py: what NVIDIA's kernels are made of knows nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import Config
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, TritonConfigT

# Of a CU of CDNA, and of a WGP of RDNA.
SIMDS = 4


@dataclass(frozen=True, slots=True)
class AmdPrefillConfig(PrefillConfig):
    """As PrefillConfig, with hints.

    waves_per_eu: waves that share the registers of a SIMD; 0 leaves the number to the compiler.
    matrix_instr_nonkdim: rows of a matrix instruction; 0 leaves them to it, too.
    """

    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0


@dataclass(frozen=True, slots=True)
class AmdDecodeConfig(DecodeConfig):
    """As DecodeConfig, with the hints of AmdPrefillConfig."""

    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0


def for_device(config: TritonConfigT, device: Device) -> TritonConfigT:
    """The config as a device's compiler takes it: with room for hints where it is AMD's."""
    if device.backend != "hip" or isinstance(config, AmdPrefillConfig | AmdDecodeConfig):
        return config
    kind: Any = AmdDecodeConfig if isinstance(config, DecodeConfig) else AmdPrefillConfig
    hinted: TritonConfigT = kind(
        **{each.name: getattr(config, each.name) for each in fields(config)}
    )
    return hinted


def hints(config: Config) -> tuple[tuple[str, int], ...]:
    """What the compiler is told of a config beside its warps and stages, by Triton's names."""
    if not isinstance(config, AmdPrefillConfig | AmdDecodeConfig):
        return ()
    told = (
        ("waves_per_eu", config.waves_per_eu),
        ("matrix_instr_nonkdim", config.matrix_instr_nonkdim),
    )
    return tuple((name, value) for name, value in told if value)


def limited(device: Device, config: Config) -> Device:
    """The device with the registers of a thread that a config's waves leave it."""
    waves = dict(hints(config)).get("waves_per_eu", 0)
    if not waves:
        return device
    share = device.registers // (SIMDS * device.warp_size * waves)
    return replace(device, max_registers=min(device.max_registers, share))
