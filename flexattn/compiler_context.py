"""What a compile turns off meanwhile: lines of sources, meetings of warps, Python's collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flexattn.lone_waits import alone

__all__ = ["source_lines", "without_collections", "without_meetings"]


class _Switch:
    """A switch of the whole process that several threads want off for a while.

    The first of them turns it, the last turns it back, and one that somebody else has turned stays
    as it is.
    """

    def __init__(self, is_on: Callable[[], bool], turn: Callable[[bool], None]) -> None:
        self._is_on, self._turn = is_on, turn
        self._lock = threading.Lock()
        self._users = 0

    @contextmanager
    def off(self, wanted: bool = True) -> Iterator[None]:
        with self._lock:
            turned = wanted and (self._users > 0 or self._is_on())
            if turned:
                self._users += 1
                if self._users == 1:
                    self._turn(False)
        try:
            yield
        finally:
            if turned:
                with self._lock:
                    self._users -= 1
                    if not self._users:
                        self._turn(True)


def source_lines(wanted: bool) -> AbstractContextManager[None]:
    """What is compiled inside knows its lines if wanted, else as the rest of the process does.

    Without them a kernel compiles in four fifths of the time, to the same instructions.
    """
    return _lines.off(not wanted)


def without_collections() -> AbstractContextManager[None]:
    """No garbage is collected inside: a compile makes many objects beside the many that stay.

    A collection looks at all of them, for 0.1 to 0.3 s of a compile in a process with torch.
    """
    return _collector.off()


def without_meetings(wanted: bool) -> AbstractContextManager[None]:
    """What is compiled inside has no meetings of its warps where it says so; see lone_waits."""
    return _meetings.off(wanted)


def _lines_on() -> bool:
    from triton import knobs

    return not knobs.compilation.disable_line_info


def _turn_lines(on: bool) -> None:
    from triton import knobs

    knobs.compilation.disable_line_info = not on


class _Meetings:
    """Triton's hook of stages: whose it was before, while it is ours."""

    def __init__(self) -> None:
        self._before: Any = None

    def turn(self, on: bool) -> None:
        from triton import knobs

        if not on:
            self._before = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = self._before if on else alone(self._before)


_lines = _Switch(_lines_on, _turn_lines)
_collector = _Switch(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
_meetings = _Switch(lambda: True, _Meetings().turn)
