"""The tools that threads share: locks that a fork renews, turns by key, and a bounded dict.

A forked child has one thread, so what another one held is free there. It can finish no work that a
thread of its parent began: in this package work counts as begun only while a lock is held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

# How long a fork waits for one of `awaited`.
_PATIENCE_S = 30.0


_R = TypeVar("_R")
_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_awaited: list[Any] = []
# Of the thread that forks: another one may fork as soon as it has let go.
_held = threading.local()


def renewed(lock: _R) -> _R:
    """The lock, condition or event of threading, made anew in a forked child, whoever held it.

    So is anything else that has their `_at_fork_reinit`.
    """
    _renewed.add(lock)
    return lock


def awaited(lock: _R) -> _R:
    """The lock, as `renewed`, which a fork waits for: at most 30 s.

    Of what changes other libraries for a while: a child would keep the change.
    """
    _awaited.append(lock)
    return renewed(lock)


def _before() -> None:
    _held.locks = [lock for lock in _awaited if lock.acquire(timeout=_PATIENCE_S)]


def _in_parent() -> None:
    for lock in reversed(_held.locks):
        lock.release()


def _in_child() -> None:
    for lock in _renewed:
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


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


class Ranked:
    """A lock that goes to the waiting thread of the highest rank."""

    def __init__(self) -> None:
        self._at_fork_reinit()
        renewed(self)

    def _at_fork_reinit(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._taken = False

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """The lock, for a thread of this rank."""
        with self._changed:
            self._waiting.append(rank)
            self._changed.wait_for(lambda: not self._taken and rank == max(self._waiting))
            self._waiting.remove(rank)
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


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
