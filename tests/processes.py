"""A Python of its own, which finds this checkout."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from flexattn.settings import child_environment

ROOT = Path(__file__).parents[1]


def environment(interpret=False, **changes):
    """A child's: it compiles, or interprets."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    found = child_environment(interpret=interpret) | {"PYTHONPATH": os.pathsep.join(paths)}
    return found | {name: str(value) for name, value in changes.items()}


def started(*arguments, interpret=False, apart=False, **changes):
    """A Popen of `python arguments`, whose output and errors are read through pipes.

    apart: whether it has a group of its own, to which signals can be sent.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment(interpret, **changes), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=apart,
    )  # fmt: skip


def python(*arguments, status=0, **about):
    """What `python arguments` printed, (output, errors); asserts its status."""
    arguments = [textwrap.dedent(x) if isinstance(x, str) else x for x in arguments]
    with started(*arguments, **about) as process:
        found = process.communicate(timeout=300)
    assert process.returncode == status, found[1]
    return found
