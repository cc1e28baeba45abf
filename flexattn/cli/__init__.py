"""The command line: its verbs, and helpers."""

from __future__ import annotations

import errno
import os
import sys

# What a disk or a terminal that takes no more bytes answers; a closed pipe is typer's to end.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line; the status is 2 for a bad request, 1 for a failed check."""
    from flexattn.cli.app import app

    try:
        app()
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # What is still buffered has no place either, and Python would say so again as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(
            f"error: not all could be written: {error.strerror}\n"
            "  do:   make room, or send the output elsewhere\n"
        )
        sys.exit(2)
