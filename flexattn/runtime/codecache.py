"""Texts of kernels: files that people and profilers open, and modules that are executed.

    <cache_dir>/kernels/<name>

What is executed is the text that this process rendered (`module_of`), whatever a file holds.
Where the folder takes no file, or Triton's own cache takes none, a private folder of the process
serves. At the end are switches of the whole process that a compile turns for a while: lines of
sources, Triton's cache, what it prints, Python's collector.
"""

from __future__ import annotations

import atexit
import errno
import gc
import linecache
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from flexattn.errors import CacheError
from flexattn.settings import current, say_once
from flexattn.util.files import publish, read_regular, refuse_others
from flexattn.util.locks import renewed

_MAX_TEXT = 2**24
# Seconds after which an unfinished file is one of a writer that died.
_AGE = 3600.0
# A carriage return ends a comment too: what stands behind it is code.
_HEADER = re.compile(rb"(?:#[^\r\n]*\n|\n)*")


def text_file(name: str, text: str) -> Path:
    """The file of this name in the cache directory, which holds this text below its header.

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
    """True if a file of this user or of root holds a text, whatever the comments at its head."""
    try:
        found = read_regular(path, _MAX_TEXT, trusted=True)
    except CacheError:
        return False
    return found is not None and _without_header(found) == _without_header(text)


def _without_header(text: bytes) -> bytes:
    """A kernel's header names the problem that it was first rendered for: others share it."""
    head = _HEADER.match(text)
    return text if head is None else text[head.end() :]


def _remove_unfinished(folder: Path) -> None:
    """Remove what writers that died left in a folder."""
    for each in folder.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - each.lstat().st_mtime > _AGE:
                each.unlink()


def module_of(path: Path, text: str) -> ModuleType:
    """Execute a text as the module of a path.

    Triton takes a function's source from `inspect.getsourcelines`, when it is decorated or, in the
    interpreter, when it is first launched. Both read Python's table of lines, which gets the same
    text here: what lies at the path by then does not count.
    """
    name = str(path)
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")]
    # Without a time of change, `linecache.checkcache` never asks the disk.
    linecache.cache[name] = (len(text), None, lines, name)
    module = ModuleType(path.stem)
    module.__file__ = name
    # The __future__ imports of this file are not the kernel's.
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module


def private_folder() -> Path:
    """The folder, made on first use, for this user alone, and removed when the process ends.

    Raises OSError where there is no directory for temporary files.
    """
    return _made(os.getpid())


@lru_cache(maxsize=8)
def _made(process: int) -> Path:
    """process: its number, because a fork has a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="flexattn-process-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


P = ParamSpec("P")
_T = TypeVar("_T")

# What a directory says that is read-only, full, somebody else's, or no directory.
_REFUSALS = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
    errno.EIO, errno.ESTALE,
})  # fmt: skip


def with_triton_cache(compile: Callable[P, _T], *args: P.args, **kwargs: P.kwargs) -> _T:
    """The result of `compile`, called again with this process's private folder if it must be.

    Triton writes each step of a compile to TRITON_CACHE_DIR, and raises OSError where it cannot.
    """
    try:
        return compile(*args, **kwargs)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        why = error.strerror
    from triton import knobs

    given, own = knobs.cache.dir, str(private_folder() / "triton")
    if given != own:
        knobs.cache.dir = own
        say_once(
            f"compiled kernels lie in {own} until this process ends: Triton's cache {given}: "
            f"{why}; TRITON_CACHE_DIR names another directory"
        )
    return compile(*args, **kwargs)


def know_compiler() -> None:
    """Have Triton hash itself for the keys of its cache, which it does once.

    It reads 400 MB a megabyte at a time. A thread waits for Python's lock after each of them: one
    of several that compiled took seconds, and each hashed all of it.
    """
    from triton.runtime.cache import triton_key

    triton_key()


class _Switch:
    """A switch of the whole process that several threads want off for a while.

    The first of them turns it, the last turns it back, and one that somebody else has turned stays
    as it is.
    """

    def __init__(self, is_on: Callable[[], bool], turn: Callable[[bool], None]) -> None:
        self._is_on, self._turn = is_on, turn
        self._lock = threading.Lock()
        self._users: list[int] = []
        renewed(self)

    @contextmanager
    def off(self, wanted: bool = True) -> Iterator[None]:
        with self._lock:
            turned = wanted and (bool(self._users) or self._is_on())
            if turned:
                self._users.append(threading.get_ident())
                if len(self._users) == 1:
                    self._turn(False)
        try:
            yield
        finally:
            if turned:
                with self._lock:
                    self._users.remove(threading.get_ident())
                    if not self._users:
                        self._turn(True)

    def _at_fork_reinit(self) -> None:
        """A forked child has one thread: what others wanted is dropped."""
        self._lock = threading.Lock()
        gone = bool(self._users)
        self._users = [user for user in self._users if user == threading.get_ident()]
        if gone and not self._users:
            self._turn(True)


def source_lines(wanted: bool) -> AbstractContextManager[None]:
    """A context whose compiles keep source lines if wanted, else as the rest of the process does.

    Without them a kernel compiles in four fifths of the time, to the same instructions.
    """
    return _lines.off(not wanted)


def anew() -> AbstractContextManager[None]:
    """A context whose compiles do not look in Triton's cache, and replace what is there."""
    return _cached.off()


def without_collections() -> AbstractContextManager[None]:
    """No garbage is collected inside: a compile makes many objects beside the many that stay.

    So do a trace and a rendering. A collection looks at all of them, for 0.1 to 0.3 s in a process
    with torch.
    """
    return _collector.off()


def without_dumps() -> AbstractContextManager[None]:
    """A context in which a PTX that ptxas refuses is not printed whole; the error says why."""
    return _dumps.off()


def _knob(name: str) -> _Switch:
    """The switch of something that Triton does unless its knob of this name says otherwise."""

    def knobs() -> Any:
        from triton import knobs

        return knobs.compilation

    return _Switch(lambda: not getattr(knobs(), name), lambda on: setattr(knobs(), name, not on))


class _Dumps:
    """The `print` of Triton's compiler for NVIDIA: a name of its module, while it is ours."""

    def turn(self, on: bool) -> None:
        try:
            from triton.backends.nvidia import compiler
        except ImportError:  # a Triton for other GPUs alone
            return
        if on:
            del compiler.print
        else:
            compiler.print = self._say

    def _say(self, *texts: object, **options: Any) -> None:
        if not any("share the reproducer" in str(text) for text in texts):
            print(*texts, **options)


_lines, _cached = _knob("disable_line_info"), _knob("always_compile")
_collector = _Switch(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
_dumps = _Switch(lambda: True, _Dumps().turn)
