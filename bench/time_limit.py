"""A limit on how long a GPU may be waited for, also where the wait never comes back to Python."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

# Of one test or one row of a bench: it may compile for minutes.
SECONDS = 600


@contextmanager
def time_limit(seconds: float = SECONDS, file: IO[str] | None = None) -> Iterator[None]:
    """End this process where the block takes longer; the driver then ends its kernels.

    A thread of its own waits, which needs no lock of Python's: a process that waits for a kernel
    without end runs no signal handler. It prints every thread's stack to `file`, else to stderr.
    One at a time: a limit within a limit takes its place.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=file or sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
