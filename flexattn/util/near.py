"""The word that was meant: what is nearest to one that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean X?", whatever the case of its letters; "" where nothing is near."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names)
    return f"did you mean {names[close[0]]}?" if close else ""
