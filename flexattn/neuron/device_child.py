"""A process that builds one NKI kernel and runs it once, standalone, as AWS documents it.

`nki.jit` given numpy arrays compiles and executes without a framework, and leaves kernel.neff in
NKI_ARTIFACTS_DIR, which must stand before nki is imported: hence a process for each kernel.
[nrtpy] neuron-runtime/nrtpy/tutorial-debug-neff-nrtpy of the AWS Neuron documentation, SDK 2.32.

    python -m flexattn.neuron.device_child JOB RESULTS INPUTS
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexattn.runtime.codecache import module_of


@dataclass(frozen=True)
class Job:
    """A kernel's file and text with its arguments by name, in order; tensors are torch's."""

    path: Path
    text: str
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
    results = module_of(job.path, job.text).kernel(*given)
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
