"""Whether this machine is a Neuron instance that can build and run kernels, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexattn.neuron.rungs import real_package

# [sysfs] tools/neuron-sys-tools/neuron-sysfs-user-guide of the AWS Neuron documentation.
DRIVER = Path("/sys/devices/virtual/neuron_device")
_TARGETS = {"trn1": "trn1", "inf2": "trn1", "trn2": "trn2", "trn3": "trn3"}


@dataclass(frozen=True, slots=True)
class Instance:
    """A Neuron instance with AWS's package. target: of its cores. compiler: "nki" and version."""

    target: str
    compiler: str


def instance(driver: Path | None = None) -> tuple[Instance | None, str]:
    """What this machine is, or None and why it can measure nothing for Neuron."""
    devices = sorted((driver or DRIVER).glob("neuron[0-9]*"))
    if not devices:
        return None, "the Neuron driver lists no device: this is no Neuron instance"
    kind = devices[0] / "info" / "architecture" / "instance_type"
    try:
        name = kind.read_text(encoding="utf-8").strip().lower()
    except OSError as error:
        return None, f"{kind}: {error.strerror}"
    target = next((core for word, core in _TARGETS.items() if name.startswith(word)), None)
    if target is None:
        return None, f"the driver calls this instance {name!r}, and NKI has no such target"
    simulate, why = real_package()
    if simulate is None:
        return None, why
    import nki  # type: ignore[import-not-found]

    return Instance(target, f"nki {getattr(nki, '__version__', 'of no version')}"), ""
