"""TaskLocks: tuners that share a directory of records take a problem each, without a database."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from flexattn.records.files import try_lock


class TaskLocks:
    """Locks in a folder, one for each name; those of a process that ends, however, are free.

    Advisory, of the kernel. Where the folder cannot be written, or its file system knows no locks,
    every lock is given: two tuners may then measure the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, name: str) -> bool:
        """Hold a lock until it is released; False where somebody else holds it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = try_lock(self._path(name))
        except OSError:
            return True
        if handle is None:
            return False
        self._held[name] = handle
        return True

    def release(self, names: Sequence[str] | None = None) -> None:
        """Let others have these, or all that are held."""
        for name in list(self._held) if names is None else names:
            handle = self._held.pop(name, None)
            if handle is not None:
                # The file first: whoever waits for it finds that it is gone, and makes another.
                with contextlib.suppress(OSError):
                    self._path(name).unlink()
                os.close(handle)

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
