"""Files that many processes read and write at once, some of them killed: whole, or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
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
