"""A fault that somebody could make in this library, and the test that must fail with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Fault(NamedTuple):
    """A wrong text in the place of a right one, in one file.

    name: what is wrong. file: its path in the repository. old: a text that stands there once.
    new: what stands in its place. test: the node id of a test that needs no GPU, passes without
    the fault and fails with it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def interpreted(self) -> bool:
        """Whether its test runs in Triton's interpreter, which wants a process of its own."""
        return self.test.startswith("tests/interpreter/")

    def planted(self, text: str) -> str:
        """The file's text with the fault; raises ValueError unless `old` stands in it once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name!r} (tests/faults): its text stands {found} times in {self.file}; who "
                f"moves or rewrites this code mends the row:\n{self.old}"
            )
        return text.replace(self.old, self.new)
