"""Refusal: what a peer answers for a row that it cannot run."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Refusal"]

# Folders in front of a file's name: where a peer was installed or built tells a reader nothing.
_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])")


@dataclass(frozen=True)
class Refusal:
    """Why a peer has no callable for a row."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The first line of what a peer raised, files by their names alone."""
        lines = str(error).strip().splitlines()
        return cls(_FOLDERS.sub("", f"{type(error).__name__}: {lines[0] if lines else ''}"))
