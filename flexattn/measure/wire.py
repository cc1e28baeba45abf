"""What a worker and its child say to one another, as pickled frozen data over a pipe."""

from __future__ import annotations

import pickle
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from flexattn.errors import FlexAttnError
from flexattn.records.record import Failed


@dataclass(frozen=True, slots=True)
class Request:
    """A method of the child's Runner, with its arguments."""

    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The child has a request: if it dies from now on, the request may be why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request that went well; before it, `race` sends its events."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """The end of a request that did not.

    lost: the child cannot go on and exits. index: the config of a race that broke it.
    error: what the caller is told where it is the request that is wrong, and no config.
    begun: False where the child died before it had the request.
    """

    failed: Failed
    lost: bool = False
    index: int | None = None
    error: FlexAttnError | None = None
    begun: bool = True


def send(pipe: Connection[Any, Any], message: object) -> None:
    """Write one message. Raises OSError where the other side is gone.

    Plain pickle: the pipe's own would put the parent's tensors into shared memory.
    """
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection[Any, Any]) -> Any:
    """Read one message. Raises EOFError or OSError where the other side is gone."""
    return pickle.loads(pipe.recv_bytes())


def end_with_parent(handle: int, end: Callable[[], None]) -> None:
    """Call `end`, from a thread, when the parent dies.

    handle: of a pipe whose other end the parent alone holds, so that it closes then.
    """
    waiter = select.poll()
    waiter.register(handle, 0)  # a hang-up is reported without being asked for

    def wait() -> None:
        waiter.poll()
        end()

    threading.Thread(target=wait, daemon=True).start()
