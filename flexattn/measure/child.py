"""The child of a worker: serves its requests with a Runner, and ends with its parent."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from flexattn.errors import FlexAttnError
from flexattn.measure.process import (
    Begun,
    ErrorReply,
    Reply,
    Request,
    end_with_parent,
    failed,
    is_sticky,
    receive,
    send,
)
from flexattn.measure.runner import Runner
from flexattn.measure.timing import Dropped
from flexattn.records.record import Failed


def main(handle: int, where: str) -> None:
    """Serve the pipe with this handle until it closes; `where` is "package.module:RunnerClass"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    end_with_parent(handle, lambda: os.kill(os.getpid(), signal.SIGKILL))
    pipe: Connection[Any, Any] = Connection(handle)
    try:
        runner: Runner = resolve_name(where)()
        send(pipe, Reply(runner.device))
    except Exception as error:
        send(pipe, _trouble(error))
        return
    while True:
        try:
            request = receive(pipe)
        except (EOFError, OSError):
            return
        send(pipe, Begun())
        answer = _served(runner, request, pipe)
        send(pipe, answer)
        if isinstance(answer, ErrorReply) and answer.lost:
            # Not a normal exit: that would clean up in a CUDA context that is lost.
            os._exit(1)


def _served(runner: Runner, request: Request, pipe: Connection[Any, Any]) -> Reply | ErrorReply:
    try:
        if request.method == "race":
            return _race(runner, request, pipe)
        return Reply(getattr(runner, request.method)(*request.args))
    except Exception as error:
        trouble = _trouble(error)
    # What holds the tensors of a failed run is the exception's traceback, which has ended here.
    lost = is_sticky(trouble.failed) or not runner.recover()
    return ErrorReply(
        _crashed(trouble.failed) if lost else trouble.failed, lost, error=trouble.error
    )


def _race(runner: Runner, request: Request, pipe: Connection[Any, Any]) -> Reply | ErrorReply:
    for event in runner.race(*request.args):
        found = event.failure if isinstance(event, Dropped) else None
        if found is not None and (is_sticky(found) or not runner.recover()):
            return ErrorReply(_crashed(found), lost=True, index=event.index)
        send(pipe, event)
    return Reply()


def _trouble(error: Exception) -> ErrorReply:
    told = error if isinstance(error, FlexAttnError) else None
    return ErrorReply(failed(type(error).__name__, str(error), "run"), error=told)


def _crashed(found: Failed) -> Failed:
    return Failed("crash", found.error, found.message)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
