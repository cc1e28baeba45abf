"""Outcome: what became of building one source, and which failures may pass."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from flexattn.errors import BuildError, DriverError, RenderError
from flexattn.runtime.resources import spills_too_much, starved

OutcomeKind = Literal["built", "compiler", "check", "shared memory", "loader", "passing", "wrong"]
_KINDS: tuple[OutcomeKind, ...] = get_args(OutcomeKind)

# The driver's words for a kernel that it will never take. OUT_OF_RESOURCES: of registers.
_REFUSED_BY_LOADER = frozenset(
    f"CUDA_ERROR_{word}"
    for word in (
        "INVALID_IMAGE", "INVALID_KERNEL_IMAGE", "INVALID_PTX", "INVALID_SOURCE", "INVALID_VALUE",
        "LAUNCH_OUT_OF_RESOURCES", "NOT_FOUND", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION",
    )
)  # fmt: skip
_FULL = "CUDA_ERROR_OUT_OF_MEMORY"
_NO_MEMORY = ("out of memory", "memory allocation failure", "cannot allocate memory")
# A shell's exit status for a process that a signal ended starts here; Python's is negative.
_SIGNALLED = 128
_PTXAS_FAILED = 255
_MAX_REASON = 240


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one source.

    kind: "built"; refused for good by the "compiler", by a "check" of flexattn's own, for "shared
    memory", or by the "loader"; or "passing": a failure that another try may not meet (a killed
    compiler, no memory, a timeout, a full disk); or "wrong": it was launched, and its numbers are
    beyond the accuracy gate. reason: of a failure, in one line. verified: its first launch was
    held to plain torch, and is right. loop_spills,
    loop_instructions: of the loops', how many move a spilled word, and all. stack: bytes of local
    memory of each thread.
    """

    kind: OutcomeKind
    reason: str = ""
    loop_spills: int = 0
    stack: int = 0
    loop_instructions: int = 0
    verified: bool = False

    @property
    def built(self) -> bool:
        """Whether there is a kernel that can be launched."""
        return self.kind == "built"

    @property
    def starved(self) -> bool:
        """Whether there is one whose loops work on spilled registers, too many for its length."""
        return self.built and spills_too_much(self.loop_spills, self.loop_instructions, self.stack)

    @property
    def disassembled(self) -> bool:
        """Whether it took the disassembler to know what its loops spill."""
        return self.built and starved(1, self.stack)

    @property
    def of_text(self) -> bool:
        """Whether it is likely to befall every tile size of the same template."""
        return self.kind in ("compiler", "check", "passing", "wrong")

    @property
    def of_assembly(self) -> bool:
        """Whether it befell the PTX, or what became of it, and not the source."""
        by_ptxas = self.kind == "compiler" and "ptxas" in self.reason.lower()
        return by_ptxas or self.kind in ("check", "loader")

    def __str__(self) -> str:
        """In words."""
        if self.built:
            return f"{self.loop_spills} spills in its loops" if self.starved else "serves"
        if self.kind == "passing":
            return f"failed, and may not fail again: {self.reason}"
        if self.kind == "wrong":
            return f"computes wrong numbers: {self.reason}"
        by = {"shared memory": "for", "check": "by a"}.get(self.kind, "by the")
        return f"refused {by} {self.kind}: {self.reason}"


def too_large(needed: int, limit: int) -> Outcome:
    """Of a kernel that compiled and needs more shared memory than a block may have."""
    return Outcome("shared memory", f"it needs {needed} bytes of {limit}")


def outcome_of(error: Exception) -> Outcome:
    """Of an error that building raised: a refusal, unless it is known that it may pass.

    Python's chain of causes is searched: BuildError and Triton's own errors wrap what happened.
    """
    chain = tuple(_chain(error))
    for each in chain:
        if passing := _passing(each):
            return Outcome("passing", passing)
    for each in chain:
        if isinstance(each, DriverError):
            return Outcome("loader", each.got[:_MAX_REASON])
        if isinstance(each, RenderError):
            return Outcome("check", _line(each.got))
    if isinstance(error, BuildError) and error.__cause__ is None:
        return Outcome("check", _line(error.got))
    cause: BaseException = error
    # Triton wraps what a function's line met once for each call around it.
    for each in chain[1:]:
        if each is not cause.__cause__:
            break
        cause = each
    return Outcome("compiler", f"{type(cause).__name__}: {_line(str(cause))}"[:_MAX_REASON])


def concerns_the_device(error: Exception) -> bool:
    """Whether the driver failed for a reason that no other kernel would change."""
    return any(
        isinstance(each, DriverError) and each.word not in (*_REFUSED_BY_LOADER, _FULL)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _passing(error: BaseException) -> str:
    """Why an error may pass; "" where it will not."""
    if isinstance(error, (MemoryError, TimeoutError, subprocess.TimeoutExpired, OSError)):
        return f"{type(error).__name__}: {_line(str(error))}"
    if isinstance(error, DriverError):
        return error.got if error.word == _FULL else ""
    if isinstance(error, subprocess.CalledProcessError):
        status = error.returncode
        if status < 0 or _SIGNALLED < status < _PTXAS_FAILED:
            return f"{error.cmd[0]} was killed (status {status})"
        return ""
    said = str(error).lower()
    return _line(str(error)) if any(word in said for word in _NO_MEMORY) else ""


def _line(text: str) -> str:
    """The line of a compiler's message that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if set(line) != {"^"}] or [type(text).__name__]
    # ptxas marks its errors, and a command that repeats them follows; Python's stand last.
    marked = [line for line in lines if "fatal " in line or "error " in line[:40]]
    return (marked[0] if marked else lines[-1])[:_MAX_REASON]
