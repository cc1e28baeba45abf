"""A bounded, thread-safe dict that forgets what was not asked for the longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from flexattn.util.locks import renewed

K = TypeVar("K")
_V = TypeVar("_V")


class Lru(Generic[K, _V]):
    """Holds at most `size` items."""

    __slots__ = ("_items", "_lock", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[K, _V] = OrderedDict()
        self._lock = renewed(threading.Lock())

    def get(self, key: K) -> _V | None:
        """The value, which counts as used now; None if there is none."""
        value = self._items.get(key)
        # While there is plenty of room nobody needs to know the order, and reads take no lock.
        if value is not None and len(self._items) > self._size // 2:
            with self._lock:
                if key in self._items:
                    self._items.move_to_end(key)
        return value

    def put(self, key: K, value: _V) -> None:
        """Store a value, at the cost of the one least recently used."""
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)

    def discard(self, key: K) -> None:
        """Forget an item, if it is held.

        One step that takes no lock: the garbage collector may ask for it in the middle of put().
        """
        self._items.pop(key, None)

    def items(self) -> list[tuple[K, _V]]:
        """All that is held now, the least recently used first."""
        with self._lock:
            return list(self._items.items())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._items.clear()
