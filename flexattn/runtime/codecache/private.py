"""A temporary folder of this process, for what no directory of the user takes."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# As mkdtemp completes it; nobody names a directory of their own like this.
_PREFIX, _NAME = "flexattn-process-", re.compile(r"flexattn-process-[a-z0-9_]{8}")
# Seconds after which a folder without a lock has no process: making one takes no time.
_AGE = 60.0


def private_folder() -> Path:
    """The folder, made on first use, for this user alone, and removed when the process ends.

    Raises OSError where there is no directory for temporary files.
    """
    return _made(os.getpid())


@lru_cache(maxsize=8)
def _made(process: int) -> Path:
    """process: its number, because a fork has a folder of its own."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Held as long as the process lives: who finds it free knows that nobody uses the folder.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove this user's folders whose processes were killed."""
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            state = each.lstat()
            ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
            if not (ours and _NAME.fullmatch(each.name) and time.time() - state.st_mtime > _AGE):
                continue
            handle = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(handle)
