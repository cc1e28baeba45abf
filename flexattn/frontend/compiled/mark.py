"""The keys in a node's kernel_options that say that a call is ours, and what it asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexattn import __version__

__all__ = ["BARE", "MARK", "VERSION", "own", "split"]

MARK = "FLEXATTN"
# Set where a call has no mask: torch makes one of a single block for it.
BARE = f"{MARK}_WITHOUT_MASK"
# A part of the key of Inductor's cache, which keeps what a lowering of ours made of a graph.
VERSION = f"{__version__} 1"
_OWN = f"{MARK}_OPTION_"


def own(name: str) -> str:
    """The key under which an option of the call stands."""
    return _OWN + name


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A node's options without our keys, and the call's own."""
    theirs = {name: value for name, value in given.items() if not name.startswith(MARK)}
    ours = {
        name.removeprefix(_OWN): value for name, value in given.items() if name.startswith(_OWN)
    }
    return theirs, ours
