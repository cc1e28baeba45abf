"""Problem -> Choice: which kernel runs, with which config, and why; remembered when seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from flexattn.build import Builder, Kernel, RenderAnew, builder
from flexattn.cache.layers import Found, find
from flexattn.cache.store import generation
from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.lru import Lru
from flexattn.mods.expr import pretty
from flexattn.options import Options
from flexattn.problem import Problem, Structure
from flexattn.render.kernel import render
from flexattn.render.source import Source, render_combine
from flexattn.settings import current, log
from flexattn.source_store import Sources
from flexattn.space.config import Config, Language, language_of
from flexattn.space.triton import candidates, default, reasons, suited

How = Literal["hit", "hint", "nearest", "default", "forced"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a problem: config, where it came from, rendered sources.

    how: from a tuned record (as flexattn.cache.layers says it), the static default, or forced by
    the caller. origin: the same in words.
    """

    problem: Problem
    device: Device
    config: Config
    how: How
    origin: str
    source: Source
    combine: Source | None


def choices(
    problem: Problem, device: Device, options: Options, stored: bool = False
) -> Iterator[Choice]:
    """Configs with their rendered kernels, best first.

    The caller's numbers alone where there are any; else the tuned config and static defaults.
    stored: sources may come from the directory of binaries, for whoever loads those.
    Raises ConfigError when the caller's numbers cannot run, with every reason.
    """
    if options.overrides:
        forced = _forced(problem, device, options)
        yield _choice(problem, device, forced, "forced", "kernel_options", stored)
        return
    wanted = options.language
    found = _tuned(problem, device)
    if found is not None and wanted not in (None, language_of(found.config)):
        found = None
    if found is not None:
        yield _choice(problem, device, found.config, found.how, found.origin, stored)
    for position, config in enumerate(candidates(problem, device, wanted)):
        origin = f"static default for {device.arch}"
        if position:
            origin += f", choice {position + 1}: those before it need too much shared memory"
        if found is not None:
            origin += f"; the {found.how} needs too much shared memory"
        yield _choice(problem, device, config, "default", origin, stored)


def _tuned(problem: Problem, device: Device) -> Found | None:
    """What the cache says; nothing for the interpreter, whose times nobody asks for."""
    if current().mode == "off" or device.backend == "interpreter":
        return None
    return find(problem, device)


def _forced(problem: Problem, device: Device, options: Options) -> Config:
    # Numbers without a backend are those that torch documents, of a Triton template.
    only: Language = "gluon" if problem.structure.fp8 else "triton"
    start = default(problem, device, options.language or only)
    config = options.apply(start)
    if options.exact is None and options.BLOCK_N is None and options.BLOCK_M is None:
        config = suited(config, problem.structure)
    found = reasons(config, problem.structure, device)
    if found:
        raise ConfigError(
            f"kernel_options ask for {config}",
            f"it cannot run here: {'; '.join(found)}",
            f"leave the choice open, or start from {start}",
        )
    return config


def _choice(
    problem: Problem, device: Device, config: Config, how: How, origin: str, stored: bool
) -> Choice:
    root = current().binaries if stored else None
    known = None if root is None else _stored(root, problem.structure, config, device)
    source, combine = known or _rendered(problem.structure, config, device, problem.describe())
    return Choice(problem, device, config, how, origin, source, combine)


@lru_cache(maxsize=1024)
def _stored(
    root: Path, structure: Structure, config: Config, device: Device
) -> tuple[Source, Source | None] | None:
    found = Sources(root).find(structure, config, device)
    return None if found is None else (found[0], found[1] if len(found) > 1 else None)


@lru_cache(maxsize=1024)
def _rendered(
    structure: Structure, config: Config, device: Device, title: str
) -> tuple[Source, Source | None]:
    source = render(structure, config, device, f"{title} for {device.arch}")
    combine = render_combine(structure, device) if structure.kind == "decode" else None
    return source, combine


class Dispatcher:
    """The in-memory table: problem and options to a choice and its kernels."""

    def __init__(self, build: Builder, capacity: int = 4096) -> None:
        self._build = build
        self._table: Lru[object, tuple[Choice, Kernel, Kernel | None]] = Lru(capacity)

    def kernels(
        self, problem: Problem, device: Device, index: int, options: Options
    ) -> tuple[Choice, Kernel, Kernel | None]:
        """The choice for a problem, its kernel, and decode's combine kernel, built if need be."""
        settings = current()
        places = settings.mode, settings.cache, settings.cache_dir, generation()
        key = (problem, device, index, options, places)
        found = self._table.get(key)
        if found is not None:
            return found
        try:
            choice, kernel, combine = self._built(problem, device, index, options, stored=True)
        except RenderAnew:
            choice, kernel, combine = self._built(problem, device, index, options, stored=False)
        if current().debug >= 1:
            log.debug("%s -> %s (%s)", problem.describe(), choice.config, choice.origin)
        if current().debug >= 3:
            for captures in (problem.structure.score, problem.structure.mask):
                if captures is not None:
                    log.debug("%s_mod:\n%s", captures.mod.kind, pretty(captures.mod.expr))
        self._table.put(key, (choice, kernel, combine))
        return choice, kernel, combine

    def _built(
        self, problem: Problem, device: Device, index: int, options: Options, stored: bool
    ) -> tuple[Choice, Kernel, Kernel | None]:
        """Mods that load tiles of their own may need more shared memory than was estimated."""
        for choice in choices(problem, device, options, stored):
            kernel = self._build.kernel(choice.source, device, index)
            if kernel.shared_memory <= device.shared_memory:
                combine = None
                if choice.combine is not None:
                    combine = self._build.kernel(choice.combine, device, index)
                return choice, kernel, combine
        raise ConfigError(
            f"{problem.describe()}: every config needs more shared memory than "
            f"{device.shared_memory} bytes",
            "the tiles of K, V and of what the mods load fit in shared memory",
            "pass kernel_options with smaller BLOCK_M and BLOCK_N, or num_stages=1",
        )


@lru_cache(maxsize=1)
def dispatcher() -> Dispatcher:
    """The process's dispatcher."""
    return Dispatcher(builder())
