"""Texts of kernels as files: people and profilers open them, and nothing executes them.

    <cache_dir>/kernels/<name>

What is executed is the text that this process rendered (`module_of`), whatever a file holds.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from flexattn.errors import CacheError
from flexattn.runtime.codecache.private import private_folder
from flexattn.settings import current, say_once
from flexattn.util.files import publish, read_regular, refuse_others

_MAX_TEXT = 2**24
# Seconds after which an unfinished file is one of a writer that died.
_AGE = 3600.0
# A carriage return ends a comment too: what stands behind it is code.
_HEADER = re.compile(rb"(?:#[^\r\n]*\n|\n)*")


def text_file(name: str, text: str) -> Path:
    """The file of this name in the cache directory, which holds this text but for its header.

    A file that is not there, or holds anything else, is written anew. Where the folder takes no
    file, or is not this user's alone, the process's private folder serves and a warning says so
    once. Raises CacheError where that takes none either.
    """
    folder = current().cache_dir / "kernels"
    try:
        return _kept(folder / name, text)
    except (CacheError, OSError) as error:
        why = error.line if isinstance(error, CacheError) else f"{folder}: {error.strerror}"
        do = isinstance(error, CacheError) and error.do
    try:
        path = _kept(private_folder() / "kernels" / name, text)
    except OSError as error:
        raise CacheError(
            f"{why}; no temporary folder either: {error.strerror}",
            "a rendered kernel lies in a file",
            "set FLEXATTN_CACHE_DIR or TMPDIR to a directory that can be written",
        ) from error
    say_once(
        f"sources of kernels lie in {path.parent} until this process ends: {why}; "
        f"{do or 'FLEXATTN_CACHE_DIR names another directory'}"
    )
    return path


def _kept(path: Path, text: str) -> Path:
    """A path, once a file there holds the text."""
    folder = path.parent
    # Not what the umask gives: one that lets a group write would make a folder that is refused.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o755, parents=True)
    refuse_others(folder, os.stat(folder))
    if not _holds(path, text.encode()):
        publish(path, text, durable=False)
        _remove_unfinished(folder)
    return path


def _holds(path: Path, text: bytes) -> bool:
    """Whether a file of this user or of root holds a text, whatever the comments at its head."""
    try:
        found = read_regular(path, _MAX_TEXT, trusted=True)
    except CacheError:
        return False
    return found is not None and _without_header(found) == _without_header(text)


def _without_header(text: bytes) -> bytes:
    """A kernel's header names the problem that it was first rendered for: others share it."""
    head = _HEADER.match(text)
    return text if head is None else text[head.end() :]


@lru_cache(maxsize=64)
def _remove_unfinished(folder: Path) -> None:
    """Remove what writers that died left in a folder, once a process."""
    for each in folder.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - each.lstat().st_mtime > _AGE:
                each.unlink()
