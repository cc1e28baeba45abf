"""Stages: what a rendered kernel asks of its compile beyond what Triton does, and the hook for it.

The hook is one of the process. The thread that compiles tells it what to do, so that
kernels of others that compile meanwhile are as they would be without it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any, Protocol, cast

from flexattn.kernels.ptx.assembler import Ptxas, assembled_by
from flexattn.util.locks import renewed


class Pass(Protocol):
    """The interface of a pass's module."""

    def merged(self, ptx: str) -> str:
        """The PTX after the pass; raises RenderError where it is not as the pass knows it."""

    def block_warps(self, text: str) -> int | None:
        """The warps that a block of a kernel starts after it; None where they stay."""


@dataclass(frozen=True, slots=True)
class Stages:
    """passes: over the PTX, in order, each by its module in kernels/. ptxas: what assembles it."""

    passes: tuple[str, ...] = ()
    ptxas: Ptxas = ""


# As Triton compiles by itself.
OWN_STAGES = Stages()


def pass_of(name: str) -> Pass:
    """The module of a pass."""
    return cast(Pass, import_module(f"flexattn.kernels.{name}"))


def block_warps(stages: Stages, text: str) -> int | None:
    """The warps that a block starts after the passes; None where they do not change that."""
    found = (pass_of(name).block_warps(text) for name in stages.passes)
    return next((warps for warps in found if warps is not None), None)


_wanted: ContextVar[Stages | None] = ContextVar("flexattn_stages", default=None)
_lock = renewed(Lock())
_users = 0
_before: Callable[..., Any] | None = None


@contextmanager
def compiled_by(stages: Stages) -> Iterator[None]:
    """A context in which this thread's compiles pass through these stages."""
    if stages == OWN_STAGES:
        yield
        return
    _install(+1)
    token = _wanted.set(stages)
    try:
        yield
    finally:
        _wanted.reset(token)
        _install(-1)


def _install(step: int) -> None:
    """Put the hook before the one that is there, and back when nobody compiles any more."""
    global _users, _before
    from triton import knobs

    runtime: Any = knobs.runtime
    with _lock:
        _users += step
        if step > 0 and _users == 1:
            _before, runtime.add_stages_inspection_hook = runtime.add_stages_inspection_hook, _hook
        elif not _users:
            runtime.add_stages_inspection_hook = _before


def _hook(*given: Any) -> Any:
    """The hook that Triton calls: with a compile's stages; later releases also without, for a key.

    The key holds the texts of the passes, so a kernel is compiled again after one changes."""
    found = _before(*given) if _before is not None else None
    stages = _wanted.get()
    if not given:
        words = found or ("", "")
        return words if stages is None else tuple(f"{each} {_words(stages)}" for each in words)
    if stages is not None:
        _change(given[1], stages)
    return found


def _words(stages: Stages) -> str:
    """The stages in words, with the hash of each pass's text."""
    texts = (inspect.getsource(cast(ModuleType, pass_of(name))) for name in stages.passes)
    hashes = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return " ".join((str(stages), *hashes))


def _change(made: dict[str, Any], wanted: Stages) -> None:
    for name in ("ptx", "cubin"):
        if name in made:
            made[name] = partial(_assembled, wanted.ptxas, made[name])
    if "ptx" in made:
        for name in wanted.passes:
            made["ptx"] = partial(_passed, name, made["ptx"])


def _assembled(ptxas: Ptxas, make: Callable[..., Any], given: Any, metadata: Any) -> Any:
    if ptxas:
        metadata["ptxas"] = ptxas
    with assembled_by(ptxas):
        return make(given, metadata)


def _passed(name: str, make: Callable[..., Any], given: Any, metadata: Any) -> str:
    ptx: str = make(given, metadata)
    found = pass_of(name)
    warps = found.block_warps(ptx)
    if warps is not None:
        metadata["num_warps"] = warps
    return found.merged(ptx)
