"""Gluon's functions by one name each, whatever Triton's release calls them (3.6 to 3.9)."""

from __future__ import annotations

from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["barrier", "load", "reinterpret", "store"]

# Release 3.9 keeps the old names, as functions that raise.
_RENAMED = hasattr(tma, "async_load")
load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
barrier = language.barrier if hasattr(language, "barrier") else language.thread_barrier
_PLACE = language.shared_memory_descriptor
reinterpret = _PLACE.reinterpret if hasattr(_PLACE, "reinterpret") else _PLACE._reinterpret
