"""Triton's own cache of compiled kernels, where its directory takes no files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flexattn.runtime.codecache.private import private_folder
from flexattn.settings import say_once

P = ParamSpec("P")
_T = TypeVar("_T")

# What a directory says that is read-only, full, somebody else's, or no directory.
_REFUSALS = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR,
    errno.EIO, errno.ESTALE,
})  # fmt: skip


def with_triton_cache(compile: Callable[P, _T], *args: P.args, **kwargs: P.kwargs) -> _T:
    """What `compile` returns, a second time in this process's private folder if it must.

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
