"""A pass over PTX: no barrier in front of what goes into the other of two buffers.

Triton lets all warps meet before a tile of shared memory is written again, and does not tell the
tiles of one allocation apart. Where two take turns, who has passed the barrier behind the last
tile's store has read the tile before it: the one in front of the store is one too many.

A kernel that asks for this pass says so in inline assembly in front of the store. Without the pass
the barrier stays, and nothing else changes. Then 13 backwards on an H200 with Triton 3.6 take 1.02
of the time in the mean: 1.03 at 64 columns without a mask and beside a soft cap, 1.05 at 96
columns (`h200-ptx-two-buffers.json` in bench/results).
"""

from __future__ import annotations

import re

ANNOUNCED = "two_buffers 1"

# What a barrier may stand in front of: behind it are barriers that the store needs.
_STORE = re.compile(r"\b(?:stmatrix|st\.(?:volatile\.)?shared|fence\.proxy)")
# The compiler's barriers count up from 0, one a partition.
_BARRIER = re.compile(
    r"^[ \t]*(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?[ \t]+[0-4](?:, *\d+)?;[^\n]*\n",
    re.MULTILINE,
)


def block_warps(text: str) -> None:
    """A block keeps its warps."""


def merged(ptx: str) -> str:
    """The PTX without each first barrier between an announcement and the store that follows."""
    head, *rest = ptx.split(ANNOUNCED)
    return head + "".join(ANNOUNCED + _without(each) for each in rest)


def _without(text: str) -> str:
    store = _STORE.search(text)
    found = store and _BARRIER.search(text, 0, store.start())
    return text if found is None else text[: found.start()] + text[found.end() :]
