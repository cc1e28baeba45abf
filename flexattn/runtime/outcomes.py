"""Outcomes: what became of building sources, and what their first launches showed, remembered.

    <FLEXATTN_CACHE_DIR>/kernels/<arch>-<environment>/<hash of the source>.json

One sealed file a source, beside the texts of kernels: what was refused, what spills, and what was
verified by its first launch or found wrong, so that no later process compiles it again. An
environment is a compiler, a driver and an arch; the hash covers a source's whole text, so that
what a template's edit changes is compiled anew. Nothing is kept of a failure that may pass, nor
of a kernel whose loops cannot spill.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, get_args

from flexattn.device import Device, cuda_driver
from flexattn.errors import BuildError, CacheError, DriverError, RenderError
from flexattn.kernels.base.source import Source
from flexattn.runtime.kernel_store import read_sealed
from flexattn.runtime.resources import spills_too_much, starved
from flexattn.settings import current, say_once
from flexattn.util.files import publish, sealed
from flexattn.util.locks import Lru

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
    """The outcome of one source.

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
        """True if there is a kernel that can be launched."""
        return self.kind == "built"

    @property
    def starved(self) -> bool:
        """True if there is a kernel whose loops spill registers, too often for the loops'
        length.
        """
        return self.built and spills_too_much(self.loop_spills, self.loop_instructions, self.stack)

    @property
    def disassembled(self) -> bool:
        """True if its loop spills are known from the disassembler."""
        return self.built and starved(1, self.stack)

    @property
    def of_text(self) -> bool:
        """True if every tile size of the same template likely has the same outcome."""
        return self.kind in ("compiler", "check", "passing", "wrong")

    @property
    def of_assembly(self) -> bool:
        """True if the failure lies in the PTX, or in what became of it, and not in the source."""
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
    """The outcome of a kernel that compiled and needs more shared memory than a block may have."""
    return Outcome("shared memory", f"it needs {needed} bytes of {limit}")


def outcome_of(error: Exception) -> Outcome:
    """The outcome of an error that building raised: a refusal, unless it is known that it may
    pass.

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
    """True if the driver failed for a reason that no other kernel would change."""
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
    """The reason why an error may pass; "" where it will not."""
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


# Fields of a record's environment that say whose machine code was measured.
COMPILER_FIELDS = frozenset({"triton"})
# What compiles a source and judges it beside Triton: another text of these, another outcome.
_COMPILING = (
    "runtime/build.py", "runtime/codecache.py", "kernels/ptx/assembler.py",
    "kernels/ptx/stages.py", "kernels/ptx/narrow_products.py", "kernels/ptx/negated_extremes.py",
    "kernels/hopper/merge_consumers.py", "kernels/hopper_backward/two_buffers.py",
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
    """The name of the folder of the outcomes for a device here; raises as `compiler_of`."""
    driver = cuda_driver.version() if device.backend == "cuda" else 0
    told = f"{compiler_of(device)}\n{driver}\n{_code()}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return f"{device.arch}-{digest}"


def _code() -> str:
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for name in _COMPILING:
        digest.update((package / name).read_bytes())
    return digest.hexdigest()


_SCHEMA = 3
_MAX_FILE = 2**14
# Files of one environment; the oldest go first.
MAX_FILES = 2048


@dataclass(frozen=True, slots=True)
class Noted:
    """An outcome as its file has it. title: of the problem; compiler, made: for people."""

    schema: int
    source: str
    outcome: Outcome
    title: str
    compiler: str
    made: str


def root() -> Path:
    """The folder of all environments."""
    return current().cache_dir / "kernels"


class Memory:
    """The known outcomes of sources, asked before they are compiled."""

    def __init__(self) -> None:
        self._known: Lru[tuple[Path, str], tuple[Outcome | None]] = Lru(4096)
        # The names of folders: a compiler and a driver stay what they are while a process lives.
        self._folders: Lru[Device, str] = Lru(64)
        # What this process found out by a launch, or was told beside an exported binary.
        self._launched: Lru[tuple[str, str], Outcome] = Lru(8192)
        self._noted = False

    def wrong(self, source: Source, device: Device) -> Outcome | None:
        """The outcome of a source that this process found to compute wrong numbers, or None."""
        found = self._launched.get((source.hash, device.arch))
        return None if found is None or found.built else found

    def trust(self, source: Source, device: Device) -> None:
        """Take a kernel for verified in this process."""
        self._launched.put((source.hash, device.arch), Outcome("built", verified=True))

    def verified(self, source: Source, device: Device) -> bool:
        """True if this process or an earlier one, of the same environment, verified a kernel."""
        found = self._launched.get((source.hash, device.arch)) or self.find(source, device)
        if found is None or not found.verified:
            return False
        self.trust(source, device)
        return True

    def find(self, source: Source, device: Device) -> Outcome | None:
        """The outcome of a source in this environment; None where nobody knows.

        A file is asked for once in a process. One that is not sound is logged, and ignored.
        """
        if (wrong := self.wrong(source, device)) is not None:
            return wrong
        # A process that loads all its kernels need not ask, and import, the compiler.
        if not (self._noted or os.path.isdir(root())):  # Path's own raises where it may not look
            return None
        folder = self._folder(device)
        if folder is None:
            return None
        key = (folder, source.hash)
        known = self._known.get(key)
        if known is None:
            noted = _entry(folder / _name(source))
            same = noted is not None and noted.source == source.hash
            known = (noted.outcome if noted is not None and same else None,)
            self._known.put(key, known)
        return known[0]

    def note(self, source: Source, device: Device, outcome: Outcome, title: str) -> None:
        """Keep an outcome; on disk too where it can be written; if not, a warning comes once."""
        if outcome.kind == "wrong":
            self._launched.put((source.hash, device.arch), outcome)
        folder = self._folder(device)
        if folder is None or outcome.kind == "passing":
            return
        if device.backend == "interpreter" and not (outcome.verified or outcome.kind == "wrong"):
            return
        self._noted = True
        self._known.put((folder, source.hash), (outcome,))
        if device.backend == "interpreter":
            return
        made = datetime.now(timezone.utc).isoformat()[:19]
        noted = Noted(_SCHEMA, source.hash, outcome, title[:400], compiler_of(device), made)
        try:
            # Not what the umask gives: texts of kernels lie there.
            root().mkdir(mode=0o755, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            for path in sorted(folder.glob("*.json"), key=_age)[: 1 - MAX_FILES]:
                path.unlink(missing_ok=True)
            publish(folder / _name(source), sealed(asdict(noted)))
        except OSError as error:
            say_once(f"{folder}: outcomes are not kept, later processes compile again: {error}")

    def entries(self, device: Device) -> list[Noted]:
        """All that is known in this environment of a device, the oldest first."""
        folder = self._folder(device)
        found = map(_entry, folder.glob("*.json")) if folder is not None else ()
        return sorted((each for each in found if each is not None), key=lambda each: each.made)

    def forget(self) -> None:
        """Know what files say alone, as a new process does."""
        for known in (self._known, self._folders, self._launched):
            known.clear()
        self._noted = False

    def clear(self) -> int:
        """Forget all environments; returns how many files went."""
        self.forget()
        gone = 0
        for folder in root().glob("*"):
            for path in folder.glob("*.json"):
                with suppress(OSError):
                    path.unlink()
                    gone += 1
            with suppress(OSError):  # a file, or not empty
                folder.rmdir()
        return gone

    def _folder(self, device: Device) -> Path | None:
        """The folder of this environment's outcomes; None where no compiler can be named.

        Those of the interpreter are this process's alone, and no file has them.
        """
        if device.backend == "interpreter":
            return root() / "interpreter"
        name = self._folders.get(device)
        if name is None:
            try:
                name = folder_name(device)
            except (ImportError, RuntimeError, OSError, subprocess.SubprocessError):
                return None  # no compiler that can be named, and none that refuses anything
            self._folders.put(device, name)
        return root() / name


_memory = Memory()


def memory() -> Memory:
    """The process's memory."""
    return _memory


def _name(source: Source) -> str:
    return f"{source.hash[:32]}.json"


def _entry(path: Path) -> Noted | None:
    try:
        return read_sealed(path, Noted, "outcome", _SCHEMA, _MAX_FILE)
    except CacheError as error:
        words = f"{path}: not used, what it tells of is compiled: {error.line}"
        say_once(words, logging.INFO)
        return None


def _age(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
