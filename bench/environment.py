"""The environment of a measurement: versions, device, clocks, revision."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

SMI_FIELDS = ("clocks.sm", "power.draw")


def describe() -> dict[str, str]:
    """Facts by which a reader may judge or repeat a run; unknown ones are left out."""
    facts = {
        "python": platform.python_version(),
        "flexattn": _version("flexattn"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flash-attn-4": _version("flash-attn-4"),
        "revision": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "device": device.name,
            "cuda": torch.version.cuda or "",
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _smi("driver_version"),
        }
    else:
        facts["device"] = platform.processor() or platform.machine()
    return {key: value for key, value in facts.items() if value}


def clocks() -> dict[str, str]:
    """Clocks in MHz, power in W and temperature in degrees right now; empty without nvidia-smi."""
    line = _smi(",".join(SMI_FIELDS))
    return dict(zip(SMI_FIELDS, line.split(", "), strict=False)) if line else {}


def _smi(fields: str) -> str:
    if not torch.cuda.is_available():
        return ""
    lines = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    index = torch.cuda.current_device()
    return lines.splitlines()[index] if len(lines.splitlines()) > index else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() if done.returncode == 0 else ""
