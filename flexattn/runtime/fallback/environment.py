"""Where an outcome holds: the compiler, the driver and the device's arch, as a folder's name."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from flexattn.device import Device, cuda_driver

# Fields of a record's environment that say whose machine code was measured.
COMPILER_FIELDS = frozenset({"triton"})
# What compiles a source and judges it beside Triton: another text of these, another outcome.
_COMPILING = (
    "runtime/build.py", "runtime/compiler_context.py", "kernels/ptx/assembler.py",
    "kernels/ptx/hook.py", "kernels/ptx/negated_extremes.py", "kernels/ptx/warp_numbers.py",
    "kernels/hopper/merge_consumers.py", "kernels/hopper/unpadded_values.py",
    "kernels/hopper_backward/two_buffers.py",
)  # fmt: skip


def compiler_of(device: Device) -> str:
    """The compiler of a device's kernels in words: Triton's release, and ptxas with its path.

    Raises RuntimeError, OSError or subprocess.SubprocessError where there is no ptxas.
    """
    import triton

    found = f"Triton {triton.__version__}"
    if device.backend == "cuda":
        from triton.backends.nvidia import compiler

        # Triton asks for both before each compile, and remembers what it heard.
        path = compiler.get_ptxas(device.capability).path
        version = compiler.get_ptxas_version(device.capability)
        release = re.search(r"V(\d[\d.]*)", version)
        found += f", ptxas {release.group(1) if release else version.strip()} at {path}"
    return found


def folder_name(device: Device) -> str:
    """Of the outcomes that hold for a device here; raises as `compiler_of`."""
    driver = cuda_driver.version() if device.backend == "cuda" else 0
    told = f"{compiler_of(device)}\n{driver}\n{_code()}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return f"{device.arch}-{digest}"


@lru_cache(maxsize=1)
def _code() -> str:
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for name in _COMPILING:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()
