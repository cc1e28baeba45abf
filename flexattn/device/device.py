"""Device: what a target can do, detected, or named for work on a machine that lacks it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from flexattn.device.neuroncore import CORES, KIB
from flexattn.errors import InputError, PlaceError, UnsupportedError

if TYPE_CHECKING:
    import torch  # its import takes seconds, and the command line's help needs the table alone


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
    def has_tensor_memory(self) -> bool:
        """Matrix instructions that read and write tensor memory: sm_100 to sm_110, not sm_120."""
        return 100 <= self.capability < 120

    @property
    def has_tanh(self) -> bool:
        """A hardware tanh (`tanh.approx.f32`)."""
        return self.capability >= 75


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak rates of a device, as its vendor states them.

    Dense peak rates in TFLOP/s by the type of the inputs, and memory bandwidth in TB/s.

    half: float16 and bfloat16 with fp32 sums. tf32: float32 inputs on matrix units. single:
    float32 without them. e4m3 is multiplied twice as fast as half, where it is at all.
    """

    half: float
    tf32: float
    single: float
    bandwidth: float

    def peak(self, dtype: str, products: str = "ieee") -> float:
        """TFLOP/s for inputs of a dtype; products: how those of float32 are multiplied."""
        if dtype == "float8_e4m3fn":
            return 2 * self.half
        if dtype != "float32":
            return self.half
        return {"tf32x3": self.tf32 / 3, "bf16x6": self.half / 6}.get(products, self.single)

    def ridge(self, dtype: str, products: str = "ieee") -> float:
        """FLOP per byte above which arithmetic is the limit."""
        return self.peak(dtype, products) / self.bandwidth


# A row a device, with its peaks. Shared memory is the opt-in maximum of one block, as vendors
# state it. Rates are without sparsity; where a data sheet has them with sparsity alone, half.
_ROWS: tuple[tuple[Device, Peaks], ...] = (
    # NVIDIA A100 data sheet: 80 GB SXM.
    (Device("nvidia-a100", "cuda", "sm_80", 108, 163 * KIB), Peaks(312.0, 156.0, 19.5, 2.039)),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell architecture papers, appendix A: sums in fp32.
    (Device("nvidia-rtx-3090", "cuda", "sm_86", 82, 99 * KIB), Peaks(71.0, 35.6, 35.6, 0.936)),
    (Device("nvidia-rtx-4090", "cuda", "sm_89", 128, 99 * KIB), Peaks(165.2, 82.6, 82.6, 1.008)),
    # NVIDIA H100 and H200 data sheets: SXM.
    (Device("nvidia-h100", "cuda", "sm_90", 132, 227 * KIB), Peaks(989.5, 494.5, 67.0, 3.35)),
    (Device("nvidia-h200", "cuda", "sm_90", 132, 227 * KIB), Peaks(989.5, 494.5, 67.0, 4.8)),
    # NVIDIA HGX B200 and B300 data sheets, an eighth of eight GPUs; Blackwell Ultra's full chip.
    (Device("nvidia-b200", "cuda", "sm_100", 148, 227 * KIB), Peaks(2250.0, 1125.0, 75.0, 8.0)),
    (Device("nvidia-b300", "cuda", "sm_103", 160, 227 * KIB), Peaks(2250.0, 1125.0, 75.0, 8.0)),
    # NVIDIA Jetson T5000 data sheet; DGX Spark's. Of 4 bits without sparsity half a PFLOP/s and a
    # whole one: of 16 bits a quarter of that, and on GB10, as on other RTX chips, an eighth.
    (Device("nvidia-thor", "cuda", "sm_110", 20, 227 * KIB), Peaks(258.8, 129.4, 8.1, 0.273)),
    (Device("nvidia-gb10", "cuda", "sm_121", 48, 99 * KIB), Peaks(62.5, 31.0, 31.0, 0.273)),
    (
        Device("nvidia-rtx-5090", "cuda", "sm_120", 170, 99 * KIB),
        Peaks(209.5, 104.8, 104.8, 1.792),
    ),
    # AMD Instinct MI210 data sheet; MI300X's; MI355X's, which like MI210's has no tf32.
    (
        Device("amd-mi210", "hip", "gfx90a", 104, 64 * KIB, 131072, 512, 64),
        Peaks(181.0, 22.6, 22.6, 1.638),
    ),
    (
        Device("amd-mi300x", "hip", "gfx942", 304, 64 * KIB, 131072, 512, 64),
        Peaks(1307.4, 653.7, 163.4, 5.3),
    ),
    (
        Device("amd-mi355x", "hip", "gfx950", 256, 160 * KIB, 131072, 512, 64),
        Peaks(2516.6, 157.3, 157.3, 8.0),
    ),
    # AMD's pages of the products; RDNA has no tf32. Strix Halo: 40 CUs at 2.9 GHz, LPDDR5X-8000.
    (
        Device("amd-radeon-rx-7900-xtx", "hip", "gfx1100", 48, 64 * KIB, 196608, 256, 32),
        Peaks(122.8, 61.4, 61.4, 0.96),
    ),
    (
        Device("amd-radeon-8060s-graphics", "hip", "gfx1151", 20, 64 * KIB, 196608, 256, 32),
        Peaks(59.4, 29.7, 29.7, 0.256),
    ),
    (
        Device("amd-radeon-rx-9070-xt", "hip", "gfx1201", 32, 64 * KIB, 196608, 256, 32),
        Peaks(195.0, 48.7, 48.7, 0.64),
    ),
)
KNOWN: dict[str, Device] = {device.name: device for device, _ in _ROWS}
PEAKS: dict[str, Peaks] = {device.name: peaks for device, peaks in _ROWS}
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
    import torch

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
        return _detect_gpu(_current_gpu() if device.index is None else device.index)
    raise UnsupportedError(
        f"tensors on {device}",
        "kernels run on cuda and hip devices, and in the interpreter on cpu",
        "move them with x.to('cuda'), or x.cpu() with FLEXATTN_INTERPRET=1",
    )


def _current_gpu() -> int:
    import torch

    return torch.cuda.current_device()


@lru_cache(maxsize=64)
def _detect_gpu(index: int) -> Device:
    import torch

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
