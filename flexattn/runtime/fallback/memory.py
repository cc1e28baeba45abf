"""Memory: outcomes that last, in the process and on disk, so that no later process compiles again.

    <FLEXATTN_CACHE_DIR>/outcomes/<arch>-<environment>/<hash of the source>.json

One sealed file a source: what was refused, what spills, and what was verified by its first launch
or found wrong. An environment is a compiler, a driver and an arch; the hash covers a
source's whole text, so that what a template's edit changes is compiled anew. Nothing is kept of a
failure that may pass, nor of a kernel whose loops cannot spill.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

from flexattn.device import Device
from flexattn.errors import CacheError
from flexattn.kernels.base.source import Source
from flexattn.records.codec import decode
from flexattn.runtime.fallback.environment import compiler_of, folder_name
from flexattn.runtime.fallback.outcome import Outcome, OutcomeKind
from flexattn.settings import current, say_once
from flexattn.util.files import publish, read_regular, sealed, unsealed
from flexattn.util.lru import Lru

_SCHEMA = 2
_MAX_FILE = 2**14
# Files of one environment; the oldest go first.
MAX_FILES = 2048


@dataclass(frozen=True, slots=True)
class Noted:
    """An outcome as its file has it. title: of the problem; compiler, made: for people."""

    schema: int
    source: str
    kind: OutcomeKind
    reason: str
    loop_spills: int
    loop_instructions: int
    stack: int
    verified: bool
    title: str
    compiler: str
    made: str

    @property
    def outcome(self) -> Outcome:
        """Without what is told for people."""
        return Outcome(
            self.kind, self.reason, self.loop_spills, self.stack, self.loop_instructions,
            self.verified,
        )  # fmt: skip


def root() -> Path:
    """The folder of all environments."""
    return current().cache_dir / "outcomes"


class Memory:
    """What is known of sources before they are compiled."""

    def __init__(self) -> None:
        self._known: Lru[tuple[Path, str, str], tuple[Outcome | None]] = Lru(4096)
        self._wrong: Lru[tuple[str, str], Outcome] = Lru(4096)
        self._noted = False

    def wrong(self, source: Source, device: Device) -> Outcome | None:
        """What this process found of a source whose numbers are wrong; None of any other."""
        return self._wrong.get((source.hash, device.arch))

    def find(self, source: Source, device: Device) -> Outcome | None:
        """What became of a source in this environment; None where nobody knows.

        A file is asked for once in a process. One that is not sound is said, and ignored.
        """
        if (wrong := self.wrong(source, device)) is not None:
            return wrong
        # A process that loads all its kernels need not ask, and import, the compiler.
        if not (self._noted or os.path.isdir(root())):  # Path's own raises where it may not look
            return None
        folder = _folder(device)
        if folder is None:
            return None
        key = (folder, source.hash, device.arch)
        known = self._known.get(key)
        if known is None:
            known = (_read(folder / _name(source)) if os.path.isdir(folder) else None,)
            self._known.put(key, known)
        return known[0]

    def note(self, source: Source, device: Device, outcome: Outcome, title: str) -> None:
        """Remember an outcome; on disk too where it can be written, which is said once if not."""
        if outcome.kind == "wrong":
            self._wrong.put((source.hash, device.arch), outcome)
        folder = _folder(device)
        if folder is None or outcome.kind == "passing":
            return
        if device.backend == "interpreter" and not (outcome.verified or outcome.kind == "wrong"):
            return
        self._noted = True
        self._known.put((folder, source.hash, device.arch), (outcome,))
        if device.backend == "interpreter":
            return
        noted = Noted(
            _SCHEMA, source.hash, outcome.kind, outcome.reason, outcome.loop_spills,
            outcome.loop_instructions, outcome.stack, outcome.verified,
            title[:400], compiler_of(device), datetime.now(timezone.utc).isoformat()[:19],
        )  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _make_room(folder)
            publish(folder / _name(source), sealed(asdict(noted)))
        except OSError as error:
            say_once(f"{folder}: outcomes are not kept, later processes compile again: {error}")

    def entries(self, device: Device) -> list[Noted]:
        """All that is known in this environment of a device, the oldest first."""
        folder = _folder(device)
        found = map(_entry, _files(folder)) if folder is not None else ()
        return sorted((each for each in found if each is not None), key=lambda each: each.made)

    def clear(self) -> int:
        """Forget all environments; returns how many files went."""
        self._known.clear()
        self._wrong.clear()
        gone = 0
        for folder in _folders():
            for path in _files(folder):
                with suppress(OSError):
                    path.unlink()
                    gone += 1
            with suppress(OSError):
                folder.rmdir()
        return gone


@lru_cache(maxsize=1)
def memory() -> Memory:
    """The process's memory."""
    return Memory()


def _folder(device: Device) -> Path | None:
    """Where the outcomes of this environment lie; None where no compiler can be named.

    Of the interpreter a process remembers them, and no file does.
    """
    if device.backend == "interpreter":
        return root() / "interpreter"
    try:
        return root() / folder_name(device)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError):
        return None  # no compiler that can be named, and none that refuses anything


def _name(source: Source) -> str:
    return f"{source.hash[:32]}.json"


def _read(path: Path) -> Outcome | None:
    noted = _entry(path)
    return None if noted is None or not noted.source.startswith(path.stem) else noted.outcome


def _entry(path: Path) -> Noted | None:
    try:
        raw = read_regular(path, _MAX_FILE)
        if raw is None:
            return None
        noted: Noted = decode(Noted, unsealed(raw), "outcome")
        if noted.schema != _SCHEMA:
            raise CacheError(f"schema {noted.schema}", f"this version reads schema {_SCHEMA}")
        return noted
    except CacheError as error:
        words = f"{path}: not used, what it tells of is compiled: {error.line}"
        say_once(words, logging.INFO)
        return None


def _folders() -> Iterator[Path]:
    with suppress(OSError):
        yield from (each for each in root().iterdir() if each.is_dir())


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [each for each in folder.iterdir() if each.suffix == ".json"]
    return []


def _make_room(folder: Path) -> None:
    """Drop the oldest files where one more would be too many."""
    files = _files(folder)
    if len(files) < MAX_FILES:
        return

    def age(path: Path) -> float:
        with suppress(OSError):
            return path.stat().st_mtime
        return 0.0

    for path in sorted(files, key=age)[: len(files) - MAX_FILES + 1]:
        with suppress(OSError):
            path.unlink()
