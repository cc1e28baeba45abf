"""Children of the library forked from this process, which has imported what they would import.

A new Python takes two seconds of a core until torch is there, and tests of children that crash,
hang or are killed start dozens. What a child is given, its pipe, words, signals and status are as
they are without; settings that it would read from its environment are this process's.
"""

import contextlib
import os
import runpy
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest
import torch

from flexattn.measure import process


@contextlib.contextmanager
def forking():
    """Inside, Spawned forks."""
    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": _Forked})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", stand_in)
        yield


class _Forked(subprocess.Popen):
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        stdin, p2cwrite, c2pread, stdout, errread, stderr = rest[3:9]
        waits, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run(args[1:], env, pass_fds, (stdin, stdout, stderr))
        self._child_created = True
        os.close(ready)
        os.read(waits, 1)  # ends as the child closes its end: a group of its own can be killed
        os.close(waits)
        self._close_pipe_fds(stdin, p2cwrite, c2pread, stdout, errread, stderr)


def _run(arguments, environment, kept, streams):
    """The life of a child, which returns to nobody."""
    status = 1
    try:
        os.setsid()
        torch.set_num_threads(1)  # OpenMP's threads stayed with the parent
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        # Among them the parent's end of the pipe: closed with the parent, it ends the child.
        for handle in map(int, os.listdir("/proc/self/fd")):
            if handle > 2 and handle not in kept:
                with contextlib.suppress(OSError):
                    os.close(handle)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        os.environ.clear()
        os.environ.update(environment)
        how, what, *sys.argv[1:] = arguments
        if how == "-m":
            runpy.run_module(what, run_name="__main__")
        else:
            exec(what, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Also where nobody reads any more: it must not go on as a second pytest.
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)
