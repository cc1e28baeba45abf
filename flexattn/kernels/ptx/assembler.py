"""The choice of the ptxas for a kernel's PTX: Triton's own choice, or the other it brings.

Triton's wheels hold two: `ptxas` and `ptxas-blackwell`, of an older and a newer CUDA. Releases up
to 3.8 assemble for sm_90 with the first (12.8, 12.9), 3.9 with the second (13.4). Where a loop
takes all registers it matters: either of them may keep in registers what the other spills.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from flexattn.settings import names_ptxas

# "": the one that Triton takes for the arch; else the file's name.
Ptxas = Literal["", "ptxas", "ptxas-blackwell"]
PTXAS: tuple[Ptxas, ...] = get_args(Ptxas)
# The first whose cache tells kernels of both apart; the first that takes the newer for sm_90.
_KEYED, _TAKES_NEWER = (3, 7), (3, 9)
# The first that lets warps meet behind each wait for products.
_MEETS = (3, 9)
_BOUNDED_VIEWS = (3, 8)
# Releases below bring ptxas 12.8 for sm_90.
_PAST_12_8 = (3, 8)


def assemblers() -> tuple[Ptxas, ...]:
    """The ones that Hopper's kernels may be assembled with: Triton's own first.

    Its own alone where the environment names one, where the other is not installed, and where
    Triton's cache cannot tell their kernels apart (3.6). No Triton is imported for it.
    """
    if names_ptxas() or release() < _KEYED:
        return ("",)
    other: Ptxas = "ptxas" if release() >= _TAKES_NEWER else "ptxas-blackwell"
    return ("", other) if _tool(other).exists() else ("",)


def effective(ptxas: Ptxas) -> Ptxas:
    """The one that a config means here: "" where that is Triton's own, or is not to be had."""
    return ptxas if ptxas in assemblers() else ""


def preferred() -> Ptxas:
    """The one for Hopper's kernels where nothing was measured: of CUDA 12 where there is one.

    On an H200 with Triton 3.9, 12.9 beside 13.4: 14 kernels of the prefill grid and its mods at
    0.99 to 1.25 of the speed, most of them equal.
    """
    return "ptxas" if "ptxas" in assemblers() else ""


def for_split_tiles() -> Ptxas:
    """The one for loops on sm_90 whose tiles are several products, as those of D 80 are (64 + 16).

    There ptxas 12.8 can read a uniform register that holds the descriptor of a product's operand
    before it is written: e4m3 keys of D 80 and 96 were multiplied by whatever lay elsewhere. The
    12.9 beside it does not. "" where Triton's own is another, or the environment names one.
    """
    ours_to_choose = not names_ptxas() and (3, 0) <= release() < _PAST_12_8
    return "ptxas-blackwell" if ours_to_choose and _tool("ptxas-blackwell").exists() else ""


@lru_cache(maxsize=1)
def _installed() -> tuple[Path | None, str]:
    """Triton's folder and its version, from its text; None and "" where there is none."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None, ""
    text = Path(spec.origin).read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return Path(spec.origin).parent, found.group(1) if found else ""


def triton_package() -> Path | None:
    """The folder of Triton's package; None where there is none."""
    return _installed()[0]


# What templates for Hopper are written in, inside the package: no import of it needed.
_GLUON = Path("experimental/gluon/language/nvidia/hopper")


def offered() -> bool:
    """True if the installed Triton has the language of the templates for Hopper.

    What it makes of a kernel is seen when the kernel is compiled: see flexattn.runtime.dispatch.
    """
    package = triton_package()
    return package is not None and (package / _GLUON).is_dir()


def triton_version() -> str:
    """Triton's version: a process that compiles nothing need not import it."""
    return _installed()[1]


def own_ptxas() -> str:
    """The one that Triton takes for Hopper by itself, unless the environment names another."""
    return "ptxas-blackwell" if release() >= _TAKES_NEWER else "ptxas"


def waits_meet() -> bool:
    """True if Triton lets a partition's warps meet behind each wait for products, as 3.9 does."""
    return release() >= _MEETS


def bounds_views() -> bool:
    """True if Triton refuses views that end behind the shared memory they are of, as 3.8 does."""
    return release() >= _BOUNDED_VIEWS


def release() -> tuple[int, ...]:
    """Triton's release as numbers, (3, 9); () where there is none."""
    return tuple(int(part) for part in triton_version().split(".")[:2] if part.isdigit())


def _tool(name: str) -> Path:
    package = triton_package()
    assert package is not None, "assemblers() names none where there is no Triton"
    return package / "backends" / "nvidia" / "bin" / name


_path: ContextVar[str | None] = ContextVar("flexattn_ptxas", default=None)


@contextmanager
def assembled_by(ptxas: Ptxas) -> Iterator[None]:
    """A context in which that ptxas assembles this thread's kernels; other threads keep theirs."""
    if not ptxas:
        yield
        return
    _let_threads_choose()
    token = _path.set(str(_tool(ptxas)))
    try:
        yield
    finally:
        _path.reset(token)


def ptx_version(ptxas: Ptxas) -> int | None:
    """The newest PTX that a ptxas reads, as Triton's option has it: 88 is 8.8; None for its own.

    Triton writes PTX of its own choice's release otherwise, which an older one refuses.
    """
    if not ptxas:
        return None
    from triton import knobs
    from triton.backends.nvidia import compiler

    found = knobs.NvidiaTool.from_path(str(_tool(ptxas)))
    return None if found is None else int(compiler.ptx_get_version(found.version))


def _let_threads_choose() -> None:
    """Triton's knob for a ptxas is one of the process, and lies in its environment.

    Torch may compile in other threads meanwhile, so the function that asks the knob is told by
    the thread that calls it.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    own = compiler.get_ptxas
    if own.__module__ == __name__:
        return

    def get_ptxas(arch: int) -> Any:
        path = _path.get()
        found = None if path is None else knobs.NvidiaTool.from_path(path)
        return found or own(arch)

    compiler.get_ptxas = get_ptxas
