"""Turns: one thread at a time for each key, and threads with other keys beside it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from flexattn.util.locks import renewed


class Turns:
    """Reentrant locks by key, each kept for as long as a thread has it or waits for it."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._guard = renewed(threading.Lock())

    def of(self, key: Hashable) -> Any:
        """The lock of a key."""
        with self._guard:
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = renewed(threading.RLock())
        return lock
