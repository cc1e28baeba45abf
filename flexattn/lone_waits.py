"""Waits of a Hopper kernel at which its warps do not meet.

Between two waits at one barrier of shared memory Triton has all warps of a program meet, so that
none is a phase ahead when another still waits. Where the loading warp fills a tile again only when
every thread has given it back, none can be: there the kernel says that it waits alone, and the
meeting that the compiler put before that wait is taken out of its PTX. What is said has no other
effect, and where nothing is found the kernel is as right, and slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["ALONE", "alone", "taken_out"]

# What a kernel writes before such a wait, as a comment of its assembly.
ALONE = "waits alone"
# A hardware barrier with a number, which no assembly of the templates writes.
_MEETING = re.compile(r"\s*bar\.sync\s+\d+\s*[,;]")
_WAIT = "mbarrier.try_wait"


def taken_out(ptx: str) -> str:
    """PTX without the meetings of a whole program between what says ALONE and the wait meant."""
    kept, before_wait = [], False
    for line in ptx.splitlines(keepends=True):
        if ALONE in line:
            before_wait = True
        elif _WAIT in line:
            before_wait = False
        if not (before_wait and _MEETING.match(line)):
            kept.append(line)
    return "".join(kept)


def alone(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Triton's hook of a compile's stages that takes them out, behind the one there was before.

    Later releases call it without arguments too, for words that belong into the key of a cache.
    """

    def inspect(*given: Any) -> Any:
        found = before(*given) if before is not None else None
        if not given:
            return tuple(f"{each} {ALONE}" for each in found or ("", ""))
        stages = given[1]
        make = stages.get("ptx")
        if make is not None:
            stages["ptx"] = lambda source, metadata: taken_out(make(source, metadata))
        return found

    return inspect
