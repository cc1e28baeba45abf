"""A lock per GPU of this host, so that no two tuners time on one at once."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flexattn.records.files import open_lock
from flexattn.settings import current, log, say_once


@contextmanager
def device_lock(
    device: str, *, alone: bool, say: Callable[[str], None] = log.warning
) -> Iterator[None]:
    """Hold a device for a block of code, alone for timing, or beside others that do not time.

    Waits, and says so once, while somebody else holds it in the way. The lock is advisory, lies in
    the user's cache directory, and ends with the process that holds it. Where that directory takes
    no lock the block runs without, which is said once. "" locks nothing.
    """
    if not device:
        yield
        return
    path = current().cache_dir / "locks" / (re.sub(r"[^A-Za-z0-9_.-]", "_", device) + ".lock")
    handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_lock(path)
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {device}: another tuner of this host measures on it ({path})")
            fcntl.flock(handle, kind)
    except OSError as error:
        say_once(f"{path}: {error.strerror}: other tuners of this host may time on {device} too")
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
