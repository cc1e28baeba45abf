"""The ladder of verification: which rungs are there on this machine, and what each one proves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHERE = (
    "the real packages are on the AWS Neuron repository: "
    "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com nki neuronx-cc"
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
