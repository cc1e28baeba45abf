"""The limits of a device by the name that its driver gives."""

from __future__ import annotations

from flexattn.device import LIMITS
from flexattn.device.limits import Limits

# Cards that share a name with one of the table and do less: part of the name, as data sheets say.
_CARDS: tuple[tuple[str, Limits], ...] = (
    # NVIDIA H200 data sheet: the NVL card has the SXM's memory and a lower power limit.
    ("h200-nvl", Limits(835.5, 417.5, 60.0, 4.8)),
    # NVIDIA H100 data sheet: NVL, PCIe.
    ("h100-nvl", Limits(835.5, 417.5, 60.0, 3.9)),
    ("h100-pcie", Limits(756.5, 378.0, 51.0, 2.0)),
    # NVIDIA A100 data sheet: 40 GB.
    ("a100-sxm4-40gb", Limits(312.0, 156.0, 19.5, 1.555)),
    ("a100-pcie-40gb", Limits(312.0, 156.0, 19.5, 1.555)),
)


def limits_of(device: str) -> Limits | None:
    """The limits of a device by its name ("nvidia-h200", "nvidia-h100-80gb-hbm3"), if known."""
    name = device.lower().replace(" ", "-")
    known = sorted(((_model(each), limits) for each, limits in LIMITS.items()), key=_length)
    return next((limits for part, limits in (*_CARDS, *known) if part in name), None)


def _model(name: str) -> str:
    """What drivers, too, call a device of the table: its name without its maker."""
    return name.partition("-")[2].removesuffix("-graphics")


def _length(known: tuple[str, Limits]) -> int:
    """The longer name before one that is a part of it."""
    return -len(known[0])
