"""Which ptxas makes machine code of a kernel's PTX: Triton's own choice, or the other it brings.

Triton's wheels hold two: `ptxas` and `ptxas-blackwell`, of an older and a newer CUDA. Releases up
to 3.8 assemble for sm_90 with the first (12.8, 12.9), 3.9 with the second (13.4). Where a loop
takes all registers it matters: either of them may keep in registers what the other spills.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from flexattn.settings import names_ptxas

__all__ = [
    "PTXAS",
    "Ptxas",
    "assembled_by",
    "assemblers",
    "own_ptxas",
    "preferred",
    "triton_version",
]

# "": the one that Triton takes for the arch; else the file's name.
Ptxas = Literal["", "ptxas", "ptxas-blackwell"]
PTXAS: tuple[Ptxas, ...] = get_args(Ptxas)
# The first whose cache tells kernels of both apart; the first that takes the newer for sm_90.
_KEYED, _TAKES_NEWER = (3, 7), (3, 9)


@lru_cache(maxsize=1)
def assemblers() -> tuple[Ptxas, ...]:
    """The ones that Hopper's kernels may be assembled with: Triton's own first.

    Its own alone where the environment names one, where the other is not installed, and where
    Triton's cache cannot tell their kernels apart (3.6). No Triton is imported for it.
    """
    if names_ptxas() or _release() < _KEYED:
        return ("",)
    other: Ptxas = "ptxas" if _release() >= _TAKES_NEWER else "ptxas-blackwell"
    return ("", other) if _tool(other).exists() else ("",)


def preferred() -> Ptxas:
    """The one for Hopper's kernels where nothing was measured: of CUDA 12 where there is one.

    On an H200 with Triton 3.9, 12.9 beside 13.4: 14 kernels of the prefill grid and its mods at
    0.99 to 1.25 of the speed, most of them equal. A kernel whose loops it spills is tried with
    the other.
    """
    return "ptxas" if "ptxas" in assemblers() else ""


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Triton's version, from its text: a process that compiles nothing need not import it."""
    path = _package() / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def own_ptxas() -> str:
    """The one that Triton takes for Hopper by itself, unless the environment names another."""
    return "ptxas-blackwell" if _release() >= _TAKES_NEWER else "ptxas"


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in triton_version().split(".")[:2] if part.isdigit())


def _package() -> Path:
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent if spec and spec.origin else Path("triton")


def _tool(name: str) -> Path:
    return _package() / "backends" / "nvidia" / "bin" / name


class _InForce:
    """The ptxas that Triton takes in this process now: threads that want another one wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._name: Ptxas = ""
        self._scope = ExitStack()

    @contextmanager
    def __call__(self, name: Ptxas) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._name == name)
            if not self._users:
                self._name = name
                self._take(name)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._scope.close()
                    self._changed.notify_all()

    def _take(self, name: Ptxas) -> None:
        if not name:
            return
        from triton import knobs

        nvidia: Any = knobs.nvidia
        self._scope.enter_context(nvidia.scope())
        # Triton asks for one of the two by the arch; here both are the one that is wanted.
        nvidia.ptxas = nvidia.ptxas_blackwell = str(_tool(name))


# with assembled_by(name): what Triton assembles inside is assembled by that ptxas.
assembled_by = _InForce()
