"""Locks across a fork: the child has one thread, so what another one held is free there.

A child can finish no work that a thread of its parent began: in this package work counts as begun
only while a lock is held.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

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
