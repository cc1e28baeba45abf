"""Files that many processes read and write at once, some of them killed: whole, or not there.

Whole files and lines of files, locks on files, and room for a new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from flexattn.errors import CacheError


def read_regular(
    path: str | Path, most: int, *, trusted: bool = False, links: bool = False
) -> bytes | None:
    """The bytes of a plain file; None where nothing is there.

    trusted: what it holds decides which code runs, so `refuse_others` judges it first. links: the
    path may be a link to such a file, as one that a user names may be. Raises
    CacheError for a link, a directory, a pipe, a file above `most` bytes or one that cannot be
    read. Nothing here waits: a pipe is opened without blocking.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror}", "it is a plain file, and readable") from None
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or state.st_size > most:
            raise CacheError(f"{path}: no file of at most {most} bytes", "it is a plain file")
        if trusted:
            refuse_others(path, state)
        # One read holds all of a file that nobody is writing; a file object costs more than it.
        parts = []
        while part := os.read(handle, state.st_size + 1):
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise CacheError(f"{path}: no file of at most {most} bytes", "it is a plain file")
        return b"".join(parts)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror}") from None
    finally:
        os.close(handle)


def refuse_others(path: str | Path, state: os.stat_result) -> None:
    """Raise CacheError for a file or a folder that another user owns or may write.

    state: of what lies at the path. Root may be the owner. In a folder with the sticky bit others
    may write, because they can neither replace nor remove what is ours.
    """
    rule = "it belongs to this user or to root, and nobody else may write it"
    if state.st_uid not in (os.geteuid(), 0):
        raise CacheError(f"{path} belongs to user {state.st_uid}", rule)
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        mode = stat.filemode(state.st_mode)
        raise CacheError(f"{path} is {mode}", rule, f"chmod go-w {path}")


def publish(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write beside the file and move it there in one step: whole, or not at all.

    Others may read the file. durable: wait until the disk has it; without that, a file that a
    power failure cut short is for the reader to see.
    """
    data = memoryview(content.encode() if isinstance(content, str) else content)
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        try:
            os.fchmod(handle, 0o644)
            while data:
                data = data[os.write(handle, data) :]
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sealed(data: Any) -> str:
    """JSON data as the text of a file, with a sha256 that a changed byte would not fit."""
    body = json.dumps(data)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"data": {body},\n "sha256": "{digest}"}}\n'


def unsealed(raw: bytes) -> Any:
    """The data of such a file; raises CacheError for anything else."""
    body, mark, tail = raw.removeprefix(b'{"data": ').rpartition(b',\n "sha256": "')
    if not mark or tail != b'%s"}\n' % hashlib.sha256(body).hexdigest().encode():
        raise CacheError(
            "its checksum does not fit", "it is whole, and written by this tool alone"
        )
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"no JSON: {str(error)[:200]}") from None


_PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def append_line(path: Path, line: bytes, most: int) -> bool:
    """Add a line in one write, so that lines of several processes never mix.

    False where the file would pass `most` bytes. Raises OSError where it cannot be written; of a
    line for which the disk has no room nothing stays.
    """
    with _held(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as handle:
        size = os.fstat(handle).st_size
        if size + len(line) >= most:
            return False
        if os.write(handle, line + b"\n") <= len(line):
            os.ftruncate(handle, size)  # the next line would go on where this one broke off
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return True


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
        handle = os.open(path, how | _PLAIN, 0o644)
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
        handle = open_lock(path)
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
    """True if a file was not replaced while this process waited for it."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def aside(path: Path) -> Path:
    """The first free name for a file that is no record."""
    names = (path.with_name(f"{path.name}{'' if i == 0 else f'.{i}'}.bad") for i in count())
    return next(name for name in names if not os.path.lexists(name))


def open_lock(path: Path) -> int:
    """A file to lock, made where it is not there; another user's is only read, which is enough.

    Raises OSError where it cannot be made or read, and for a link: what it leads to would be made,
    or locked, wherever that is.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _PLAIN, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | _PLAIN)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        words = "a lock is a plain file, and this is a link: remove it"
        raise OSError(errno.ELOOP, words, str(path)) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time in an environment's folder; the kernel frees it if the writer dies.

    Where the file system knows no locks, the writers go on without: each file is still whole.
    """
    handle = open_lock(folder / ".lock")
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


def is_closed(folder: Path) -> bool:
    """True if a folder, or one above it, is another user's and not for this one to look into."""
    try:
        os.stat(folder / ".")
    except PermissionError:
        return True
    except OSError:  # it is not there, or not yet
        return False
    return False
