"""AWS Neuron's tools on this machine, and the rungs of verification that they allow."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexattn.errors import UnsupportedError

WHERE = (
    "the real packages are on the AWS Neuron repository: "
    "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com nki neuronx-cc"
)
NATIVE = (
    "torch-neuronx with the device `neuron`, of SDK 2.33 and newer, is on the same repository: "
    "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com torch-neuronx==2.14.*"
)


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder. why: of what is not available, and where to get it."""

    name: str
    proves: str
    available: bool
    why: str = ""


def rungs() -> tuple[Rung, ...]:
    """The rungs, lowest first; each includes no claim of those above it."""
    simulate, why = real_package()
    devices = sorted(Path("/dev").glob("neuron[0-9]*"))
    device_why = "" if devices else "no /dev/neuron*: this is no Neuron instance"
    return (
        Rung("lint", "the source has no construct that the NKI compiler is known to refuse", True),
        Rung(
            "interpreter",
            "arithmetic, shapes, capacity and engine rules of trn1, trn2 and trn3, as documented; "
            "nothing about the compiler",
            True,
        ),
        Rung(
            "simulator",
            "AWS's own semantics of the same source; not capacity, not the compiler",
            simulate is not None,
            why,
        ),
        Rung(
            "device",
            "that it compiles, runs and is right; flexattn has never been run on one",
            bool(devices) and simulate is not None,
            device_why or why,
        ),
    )


def real_package() -> tuple[Callable[..., Any] | None, str]:
    """`nki.simulate` of the real package, or None and why not.

    The public Python index has packages of these names that install and then refuse to be
    imported: what counts is whether nki has `simulate`.
    """
    try:
        nki = importlib.import_module("nki")
    except ModuleNotFoundError as error:
        if error.name not in ("nki", None):
            return None, f"nki is installed, and lacks {error.name}; {WHERE}"
        return None, f"nki is not installed; {WHERE}"
    except ImportError as error:
        text = str(error).strip().splitlines()
        said = text[0][:200] if text else "no reason"
        return None, f"nki is a placeholder that refuses to be imported ({said}); {WHERE}"
    simulate = getattr(nki, "simulate", None)
    if not callable(simulate):
        return None, f"nki has no `simulate`: it is older than 0.3, or a placeholder; {WHERE}"
    return simulate, ""


def nki_op() -> Callable[..., Any]:
    """torch_neuronx.nki_op; raises UnsupportedError where the native package is not installed."""
    try:
        from torch_neuronx import nki_op as found  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnsupportedError(
            f"an NKI kernel as an operator of torch's: {str(error)[:200]}",
            "torch_neuronx registers it, by nki_op",
            NATIVE,
        ) from error
    registered: Callable[..., Any] = found
    return registered


# [sysfs] tools/neuron-sys-tools/neuron-sysfs-user-guide of the AWS Neuron documentation.
DRIVER = Path("/sys/devices/virtual/neuron_device")
_TARGETS = {"trn1": "trn1", "inf2": "trn1", "trn2": "trn2", "trn3": "trn3"}


def driver_target(driver: Path | None = None) -> tuple[str, str]:
    """The target of this machine's cores by its driver; or "", and why there is none."""
    devices = sorted((driver or DRIVER).glob("neuron[0-9]*"))
    if not devices:
        return "", "the Neuron driver lists no device: this is no Neuron instance"
    kind = devices[0] / "info" / "architecture" / "instance_type"
    try:
        name = kind.read_text(encoding="utf-8").strip().lower()
    except OSError as error:
        return "", f"{kind}: {error.strerror}"
    target = next((core for word, core in _TARGETS.items() if name.startswith(word)), "")
    why = f"the driver calls this instance {name!r}, and NKI has no such target"
    return target, "" if target else why
