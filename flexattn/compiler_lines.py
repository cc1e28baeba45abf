"""Whether kernels know the lines of their source, which profilers show and compilers pay for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["source_lines"]

_lock = threading.Lock()
_without = 0


@contextmanager
def source_lines(wanted: bool) -> Iterator[None]:
    """What is compiled inside knows its lines if wanted, else as the rest of the process does.

    Without them a kernel compiles in four fifths of the time, to the same instructions. Triton's
    switch is the whole process's: the first of several threads turns it, the last turns it back,
    and one that somebody else has turned stays as it is.
    """
    global _without
    from triton import knobs

    with _lock:
        turned = not wanted and (_without > 0 or not knobs.compilation.disable_line_info)
        if turned:
            _without += 1
            knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        if turned:
            with _lock:
                _without -= 1
                if not _without:
                    knobs.compilation.disable_line_info = False
