"""Progress: what long work tells whoever watches it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener; the command line draws it."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins that takes `total` steps; 0 where nobody knows."""

    def step(self, text: str, best_us: float | None = None) -> None:
        """One step is done; best_us is the best time so far, in microseconds."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class _Silent:
    def stage(self, name: str, total: int) -> None:
        """Says nothing."""

    def step(self, text: str, best_us: float | None = None) -> None:
        """Says nothing."""

    def note(self, text: str) -> None:
        """Says nothing."""


SILENT: Progress = _Silent()
