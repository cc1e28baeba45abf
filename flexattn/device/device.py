"""Device: what a target can do, detected, or named for work on a machine that lacks it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flexattn.device.neuroncore import CORES
from flexattn.errors import InputError, PlaceError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Device:
    """A compile and dispatch target.

    arch: "sm_90" or "gfx942". num_sms: SMs, CUs, or RDNA's pairs of CUs (WGPs), which torch counts
    there too. shared_memory: bytes one block may use. registers: 32-bit registers of one of these.
    max_registers: of one thread.
    """

    name: str
    backend: str
    arch: str
    num_sms: int
    shared_memory: int
    registers: int = 65536
    max_registers: int = 255
    warp_size: int = 32

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 where the arch is no NVIDIA one."""
        return int(self.arch[3:]) if self.arch.startswith("sm_") else 0

    @property
    def has_tma(self) -> bool:
        """The bulk tensor copy engine, which reads whole tiles and zero-fills past the end."""
        return self.capability >= 90

    @property
    def has_wgmma(self) -> bool:
        """Matrix instructions of a whole warpgroup, with one operand in shared memory."""
        return self.capability == 90

    @property
    def has_tanh(self) -> bool:
        """A hardware tanh (`tanh.approx.f32`)."""
        return self.capability >= 75


KIB = 1024
# Shared memory limits are the opt-in maxima of one block as the vendors state them.
KNOWN: dict[str, Device] = {
    device.name: device
    for device in (
        Device("nvidia-a100", "cuda", "sm_80", 108, 163 * KIB),
        Device("nvidia-rtx-3090", "cuda", "sm_86", 82, 99 * KIB),
        Device("nvidia-rtx-4090", "cuda", "sm_89", 128, 99 * KIB),
        Device("nvidia-h100", "cuda", "sm_90", 132, 227 * KIB),
        Device("nvidia-h200", "cuda", "sm_90", 132, 227 * KIB),
        Device("nvidia-b200", "cuda", "sm_100", 148, 227 * KIB),
        Device("nvidia-rtx-5090", "cuda", "sm_120", 170, 99 * KIB),
        Device("amd-mi300x", "hip", "gfx942", 304, 64 * KIB, 131072, 512, 64),
        Device("amd-mi355x", "hip", "gfx950", 256, 160 * KIB, 131072, 512, 64),
        Device("amd-radeon-rx-7900-xtx", "hip", "gfx1100", 48, 64 * KIB, 196608, 256, 32),
        Device("amd-radeon-8060s-graphics", "hip", "gfx1151", 20, 64 * KIB, 196608, 256, 32),
        Device("amd-radeon-rx-9070-xt", "hip", "gfx1201", 32, 64 * KIB, 196608, 256, 32),
    )
}
# Offline targets of another kind, whose kernels are NKI: shared_memory is SBUF, num_sms the
# NeuronCores of a chip; registers mean nothing there. What they can do: neuroncore.py.
NEURON: dict[str, Device] = {
    core.name: Device(core.name, "neuron", core.name, core.cores, 128 * core.sbuf_bytes)
    for core in CORES.values()
}
# Its tiles are arrays in memory: no number of registers is too many.
INTERPRETER = Device("interpreter", "interpreter", "cpu", 4, 227 * KIB, 2**24, 2**16)


def is_neuron(arch: str) -> bool:
    """Whether it is a NeuronCore's."""
    return arch in CORES


def is_rdna(device: Device) -> bool:
    """Whether it is an AMD GPU with waves of 32 threads and 256 registers; CDNA's have 64 and 512.

    No property of a Device: what kernels are rendered for asks nothing of it.
    """
    return device.backend == "hip" and device.warp_size == 32


def named(name: str) -> Device:
    """A device of the table, for rendering and compiling without it.

    Raises InputError, listing the names there are.
    """
    if name in NEURON:
        raise InputError(
            f"{name} is a Neuron device",
            "this works on Triton's kernels",
            "flexattn tune and flexattn render take it",
        )
    if name not in KNOWN:
        raise InputError(
            f"no device is called {name!r}", "it must be in the table", f"use one of {list(KNOWN)}"
        )
    return KNOWN[name]


def usable(device: torch.device | str) -> torch.device:
    """A device that tensors can be on here, a GPU with its index.

    Raises PlaceError for what is no device, and UnsupportedError for a GPU where there is none.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise PlaceError(
            f"device {device!r}", "it is a torch.device or the name of one", "pass 'cuda' or 'cpu'"
        ) from None
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {str(found)!r}",
            "this process has no GPU that torch can use",
            "see torch.cuda.is_available(); on the CPU pass device='cpu', where kernels need "
            "FLEXATTN_INTERPRET=1",
        )
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def detect(device: torch.device) -> Device:
    """The Device behind a torch device; CPU tensors mean the interpreter.

    Raises UnsupportedError for a device that no template serves.
    """
    if device.type == "cpu":
        return INTERPRETER
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return _detect_gpu(index)
    raise UnsupportedError(
        f"tensors on {device}",
        "kernels run on cuda and hip devices, and in the interpreter on cpu",
        "move them with x.to('cuda'), or x.cpu() with FLEXATTN_INTERPRET=1",
    )


@lru_cache(maxsize=64)
def _detect_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    name = properties.name.lower().replace(" ", "-")
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        # One that nobody knows is like the first of its kind: RDNA tells itself by its waves.
        first = "amd-radeon-rx-7900-xtx" if properties.warp_size == 32 else "amd-mi300x"
        like = next((known for known in KNOWN.values() if known.arch == arch), KNOWN[first])
        return Device(
            name,
            "hip",
            arch,
            properties.multi_processor_count,
            like.shared_memory,
            like.registers,
            like.max_registers,
            properties.warp_size,
        )
    return Device(
        name,
        "cuda",
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 99 * KIB),
        getattr(properties, "regs_per_multiprocessor", 65536),
    )
