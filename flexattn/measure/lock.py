"""A lock per GPU of this host, so that no two tuners time on one at once."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flexattn.settings import current, log

__all__ = ["device_lock"]


@contextmanager
def device_lock(
    device: str, *, alone: bool, say: Callable[[str], None] = log.warning
) -> Iterator[None]:
    """Hold a device for a block of code, alone for timing, or beside others that do not time.

    Waits, and says so once, while somebody else holds it in the way. The lock is advisory, lies in
    the user's cache directory, and ends with the process that holds it. "" locks nothing.
    """
    if not device:
        yield
        return
    folder = current().cache_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (re.sub(r"[^A-Za-z0-9_.-]", "_", device) + ".lock")
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {device}: another tuner of this host measures on it ({path})")
            fcntl.flock(file, kind)
        yield
