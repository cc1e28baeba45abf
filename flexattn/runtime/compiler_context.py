"""What a compile changes meanwhile: lines of sources, Triton's cache, Python's collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flexattn.util.locks import renewed


class _Switch:
    """A switch of the whole process that several threads want off for a while.

    The first of them turns it, the last turns it back, and one that somebody else has turned stays
    as it is.
    """

    def __init__(self, is_on: Callable[[], bool], turn: Callable[[bool], None]) -> None:
        self._is_on, self._turn = is_on, turn
        self._lock = threading.Lock()
        self._users: list[int] = []
        renewed(self)

    @contextmanager
    def off(self, wanted: bool = True) -> Iterator[None]:
        with self._lock:
            turned = wanted and (bool(self._users) or self._is_on())
            if turned:
                self._users.append(threading.get_ident())
                if len(self._users) == 1:
                    self._turn(False)
        try:
            yield
        finally:
            if turned:
                with self._lock:
                    self._users.remove(threading.get_ident())
                    if not self._users:
                        self._turn(True)

    def _at_fork_reinit(self) -> None:
        """A forked child has one thread: what others wanted is dropped."""
        self._lock = threading.Lock()
        gone = bool(self._users)
        self._users = [user for user in self._users if user == threading.get_ident()]
        if gone and not self._users:
            self._turn(True)


def source_lines(wanted: bool) -> AbstractContextManager[None]:
    """What is compiled inside knows its lines if wanted, else as the rest of the process does.

    Without them a kernel compiles in four fifths of the time, to the same instructions.
    """
    return _lines.off(not wanted)


def anew() -> AbstractContextManager[None]:
    """What is compiled inside is not looked for in Triton's cache, and replaces what is there."""
    return _cached.off()


def without_collections() -> AbstractContextManager[None]:
    """No garbage is collected inside: a compile makes many objects beside the many that stay.

    So do a trace and a rendering. A collection looks at all of them, for 0.1 to 0.3 s in a process
    with torch.
    """
    return _collector.off()


def without_dumps() -> AbstractContextManager[None]:
    """Where ptxas refuses a kernel inside, its whole PTX is not printed; the error says why."""
    return _dumps.off()


def _lines_on() -> bool:
    from triton import knobs

    return not knobs.compilation.disable_line_info


def _takes_cached() -> bool:
    from triton import knobs

    return not knobs.compilation.always_compile


def _turn_cached(on: bool) -> None:
    from triton import knobs

    knobs.compilation.always_compile = not on


def _turn_lines(on: bool) -> None:
    from triton import knobs

    knobs.compilation.disable_line_info = not on


class _Dumps:
    """What Triton's compiler for NVIDIA prints by: a name of its module, while it is ours."""

    def turn(self, on: bool) -> None:
        try:
            from triton.backends.nvidia import compiler
        except ImportError:  # a Triton for other GPUs alone
            return
        if on:
            del compiler.print
        else:
            compiler.print = self._say

    def _say(self, *texts: object, **options: Any) -> None:
        if not any("share the reproducer" in str(text) for text in texts):
            print(*texts, **options)


_lines = _Switch(_lines_on, _turn_lines)
_cached = _Switch(_takes_cached, _turn_cached)
_collector = _Switch(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
_dumps = _Switch(lambda: True, _Dumps().turn)
