"""What the environment says, read here and nowhere else."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from flexattn.errors import SettingsError

log = logging.getLogger("flexattn")


@dataclass(frozen=True, slots=True)
class Settings:
    """One frozen reading of the environment; `override` makes another for a block of code.

    interpret: run the real templates in Triton's CPU interpreter (FLEXATTN_INTERPRET).
    debug: 0 silent, 1 dispatch, 2 timings, 3 expressions, 4 rendered source, 5 IR, 6 PTX
        (FLEXATTN_DEBUG); each level includes those below it.
    cache_dir: where rendered sources go (FLEXATTN_CACHE_DIR).
    """

    interpret: bool
    debug: int
    cache_dir: Path


# Name, default, meaning: the README's table is checked against this one.
VARIABLES: tuple[tuple[str, str, str], ...] = (
    (
        "FLEXATTN_INTERPRET",
        "0",
        "1 runs the real templates on CPU tensors in Triton's interpreter; "
        "must be set before triton is imported",
    ),
    (
        "FLEXATTN_DEBUG",
        "0",
        "1 dispatch, 2 timings, 3 expressions, 4 rendered source, 5 IR, 6 PTX; on stderr",
    ),
    (
        "FLEXATTN_CACHE_DIR",
        "~/.cache/flexattn",
        "where rendered kernel sources are written",
    ),
)


def read(environ: Mapping[str, str]) -> Settings:
    """Parse an environment; raises SettingsError for a value that is not understood."""
    values = {name: environ.get(name, default) for name, default, _ in VARIABLES}
    interpret = values["FLEXATTN_INTERPRET"]
    if interpret not in ("0", "1", ""):
        raise SettingsError(
            f"FLEXATTN_INTERPRET={interpret!r}", "it is 0 or 1", "unset it, or set it to 1"
        )
    debug = values["FLEXATTN_DEBUG"] or "0"
    if debug not in tuple("0123456"):
        raise SettingsError(f"FLEXATTN_DEBUG={debug!r}", "it is a level from 0 to 6")
    cache_dir = Path(values["FLEXATTN_CACHE_DIR"]).expanduser()
    return Settings(interpret == "1", int(debug), cache_dir)


_override: ContextVar[Settings | None] = ContextVar("flexattn_settings", default=None)


@lru_cache(maxsize=1)
def _from_process() -> Settings:
    settings = read(os.environ)
    if settings.interpret:
        _enter_interpreter()
    if settings.debug and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("flexattn: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    return settings


def _enter_interpreter() -> None:
    """Triton decides at its first import whether it interprets or compiles, for the process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise SettingsError(
            "FLEXATTN_INTERPRET=1, but triton is imported already and compiles",
            "one process interprets or compiles, never both",
            "set FLEXATTN_INTERPRET=1 (or TRITON_INTERPRET=1) before anything imports triton",
        )
    os.environ["TRITON_INTERPRET"] = "1"


def current() -> Settings:
    """The settings in force: the innermost `override`, else the process's environment."""
    return _override.get() or _from_process()


@contextmanager
def override(**changes: object) -> Iterator[Settings]:
    """Settings for a block of code, safe with threads: `with override(debug=3): ...`."""
    if "interpret" in changes:
        raise SettingsError(
            "override(interpret=...)",
            "one process interprets or compiles, never both",
            "set FLEXATTN_INTERPRET=1 before the process starts",
        )
    settings = replace(current(), **changes)  # type: ignore[arg-type]
    token = _override.set(settings)
    try:
        yield settings
    finally:
        _override.reset(token)


def child_environment(*, interpret: bool) -> dict[str, str]:
    """This process's environment, for a child that interprets or for one that compiles."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"FLEXATTN_INTERPRET": str(int(interpret))}


@lru_cache(maxsize=256)
def say_once(message: str) -> None:
    """Log a warning the first time it is said in this process."""
    log.warning(message)


# Triton reads TRITON_INTERPRET at its first import, which may come with the next one.
_from_process()
