"""The keys in a node's kernel_options that say that a call is ours, and what it asked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexattn.settings import current

MARK = "FLEXATTN"
# Set where a call has no mask: torch makes one of a single block for it.
BARE = f"{MARK}_WITHOUT_MASK"
# Set where the call is one of torch's function, which `flexattn.install` serves: torch keeps it
# where ours refuses it.
INSTALLED = f"{MARK}_INSTALLED"
_OWN = f"{MARK}_OPTION_"


def _version() -> str:
    """A hash of what reads graphs: Inductor's cache keeps what a lowering of ours made of one."""
    package = Path(__file__).parents[2]
    folders = package / "mods", package / "frontend" / "compiled"
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    # Where torch's kernel serves a node depends on them.
    settings = current()
    names = ("batch_invariant", "check", "interpret")
    return "-".join([found, *(name for name in names if getattr(settings, name))])


# The mark's value, by which it is a part of that cache's key.
VERSION = _version()


def own(name: str) -> str:
    """The key under which an option of the call stands."""
    return _OWN + name


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A node's options without our keys, and the call's own."""
    theirs = {name: value for name, value in given.items() if not name.startswith(MARK)}
    ours = {
        name.removeprefix(_OWN): value for name, value in given.items() if name.startswith(_OWN)
    }
    return theirs, ours
