"""Failures: what an exception of a candidate means, and whether its process can go on."""

from __future__ import annotations

import re

from flexattn.records.record import Failed, Stage

# After one of these every later CUDA call of the process fails (CUDA runtime API, cudaError_t).
_STICKY = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|hardware stack error"
    r"|invalid program counter|invalid address space|launch timed out|unspecified launch failure"
    r"|device-side assert|uncorrectable (ECC|NVLink)|cudaError(Illegal|Misaligned|LaunchFailure)"
    r"|operation not supported on global/shared address space"
    r"|hip(ErrorIllegalAddress|ErrorLaunchFailure)|CUDA error:? 7(00|02|1[0-9]|2[01])\b",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out of memory|CUDA error:? 2\b", re.IGNORECASE)
_RESOURCES = re.compile(r"out of resource|(needs? more|too much) shared memory", re.IGNORECASE)
_LAUNCH = re.compile(r"cuLaunchKernel|cuTensorMapEncodeTiled")
_LENGTH = 2000


def failed(error: str, message: str, stage: Stage) -> Failed:
    """The typed failure of an exception's class name and text.

    stage: where it was raised, for what its text does not say better.
    """
    return Failed(_stage(error, message) or stage, error, clipped(message))


def is_sticky(failure: Failed) -> bool:
    """Whether the CUDA context that raised this is lost, and with it the process."""
    return failure.stage == "crash" or bool(_STICKY.search(failure.message))


def clipped(text: str, length: int = _LENGTH) -> str:
    """Text that a record can keep: its beginning and its end."""
    text = text.strip()
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _stage(error: str, message: str) -> Stage | None:
    if _STICKY.search(message):
        return "crash"
    if error in ("OutOfMemoryError", "MemoryError") or _MEMORY.search(message):
        return "memory"
    if error == "OutOfResources" or _RESOURCES.search(message):
        return "resources"
    if error in ("BuildError", "DriverError") and not _LAUNCH.search(message):
        return "build"
    return "infeasible" if error == "ConfigError" else None
