"""What writers of one cache directory need beside whole files: turns, and room for a new file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

__all__ = ["append_line", "aside", "listing", "locked"]


def append_line(path: Path, line: bytes, most: int) -> bool:
    """Add a line in one write, so that lines of several processes never mix.

    False where the file would pass `most` bytes. Raises OSError where it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(path, flags, 0o644)
    try:
        if os.fstat(handle).st_size + len(line) >= most:
            return False
        return os.write(handle, line + b"\n") == len(line) + 1
    finally:
        os.close(handle)


def aside(path: Path) -> Path:
    """The first free name for a file that is no record."""
    names = (path.with_name(f"{path.name}{'' if i == 0 else f'.{i}'}.bad") for i in count())
    return next(name for name in names if not os.path.lexists(name))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time in an environment's folder; the kernel frees it if the writer dies.

    Where the file system knows no locks, the writers go on without: each file is still whole.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def listing(folder: Path) -> list[str]:
    """The names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
