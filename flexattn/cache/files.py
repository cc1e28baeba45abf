"""What writers of one cache directory need beside whole files: turns, and room for a new file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from flexattn.files import publish, read_regular

__all__ = ["append_line", "aside", "drop_lines", "listing", "locked", "try_lock"]

_LINES = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def append_line(path: Path, line: bytes, most: int) -> bool:
    """Add a line in one write, so that lines of several processes never mix.

    False where the file would pass `most` bytes. Raises OSError where it cannot be written.
    """
    with _held(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as handle:
        if os.fstat(handle).st_size + len(line) >= most:
            return False
        return os.write(handle, line + b"\n") == len(line) + 1


def drop_lines(path: Path, drop: Callable[[bytes], bool], most: int) -> int:
    """Put a file without some of its lines in its place; how many those were.

    Who appends meanwhile waits and appends to the new one. Raises OSError where there is none or
    it cannot be written, CacheError for no plain file of at most `most` bytes.
    """
    with _held(path, os.O_RDONLY):
        lines = (read_regular(path, most) or b"").splitlines()
        kept = [line for line in lines if not drop(line)]
        if len(kept) < len(lines):
            publish(path, b"".join(line + b"\n" for line in kept))
        return len(lines) - len(kept)


@contextlib.contextmanager
def _held(path: Path, how: int) -> Iterator[int]:
    """A file that is at its place, and that nobody else appends to or replaces for this block."""
    while True:
        handle = os.open(path, how | _LINES, 0o644)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _same(handle, path):
                yield handle
                return
        finally:
            os.close(handle)


def try_lock(path: Path) -> int | None:
    """The handle of a file that this process alone holds until it closes it; None if another does.

    A file that its holder removed is made again. Raises OSError where it cannot be made or locked.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        if _same(handle, path):
            return handle
        os.close(handle)


def _same(handle: int, path: Path) -> bool:
    """Whether a file was not replaced while this process waited for it."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


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
