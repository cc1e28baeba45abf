"""AWS Neuron's tools on this machine, the rungs of verification that they allow, and one run.

Run as a module, it is a process that builds one NKI kernel and runs it once, standalone, as AWS
documents it. `nki.jit` given numpy arrays compiles and executes without a framework, and leaves
kernel.neff in NKI_ARTIFACTS_DIR, which must stand before nki is imported: hence a process for each
kernel. [nrtpy] neuron-runtime/nrtpy/tutorial-debug-neff-nrtpy of the AWS Neuron documentation, SDK
2.32.

    python -m flexattn.neuron.instance JOB RESULTS INPUTS
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexattn.errors import UnsupportedError
from flexattn.runtime.codecache import module_of

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


@dataclass(frozen=True, slots=True)
class Instance:
    """A Neuron instance with AWS's package. target: of its cores. compiler: "nki" and version."""

    target: str
    compiler: str


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


def instance(driver: Path | None = None) -> tuple[Instance | None, str]:
    """This machine as an instance; or None, and the reason why it can measure nothing."""
    target, why = driver_target(driver)
    if not target:
        return None, why
    simulate, why = real_package()
    if simulate is None:
        return None, why
    import nki  # type: ignore[import-not-found]

    return Instance(target, f"nki {getattr(nki, '__version__', 'of no version')}"), ""


@dataclass(frozen=True)
class Job:
    """A kernel's file and text with its arguments by name, in order; tensors are torch's.

    cores: physical ones that run it.
    """

    path: Path
    text: str
    cores: int
    names: tuple[str, ...]
    values: tuple[Any, ...]


def main(argv: Sequence[str]) -> None:
    """Run a job: its results as torch tensors, and its tensors by name as numpy has them."""
    import numpy

    job_path, results_path, inputs_path = map(Path, argv)
    job: Job = torch.load(job_path, weights_only=False)
    given = [_numpy(each) for each in job.values]
    arrays = {
        name: each.view(numpy.uint16) if each.dtype.itemsize == 2 else each
        for name, each in zip(job.names, given, strict=True)
        if isinstance(each, numpy.ndarray)
    }
    numpy.savez(inputs_path, **arrays)  # type: ignore[arg-type]
    results = module_of(job.path, job.text).kernel[job.cores](*given)
    results = results if isinstance(results, tuple) else (results,)
    torch.save([_torch(each) for each in results], results_path)


def _numpy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype != torch.bfloat16:
        return value.contiguous().numpy()
    import ml_dtypes  # type: ignore[import-not-found]

    return value.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def _torch(value: Any) -> torch.Tensor:
    if str(value.dtype) == "bfloat16":
        return torch.from_numpy(value.view("uint16").copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


if __name__ == "__main__":
    main(sys.argv[1:])
