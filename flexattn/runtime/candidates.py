"""Candidates: the configs that may serve a problem, in order, and the Choice of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from flexattn.device import Device
from flexattn.errors import ConfigError, RenderError
from flexattn.kernels.base.config import Config, Language, describe
from flexattn.kernels.base.features import skips_far
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.defaults import candidates, default, reasons
from flexattn.kernels.choose.options import NONE, Options
from flexattn.kernels.choose.registry import families, family_of
from flexattn.problem import Problem, Structure
from flexattn.records.layers import Found, find
from flexattn.runtime.build import Kernel, builder
from flexattn.runtime.kernel_store import KernelStore
from flexattn.runtime.outcomes import COMPILER_FIELDS, Outcome
from flexattn.settings import current

_How = Literal["hit", "hint", "nearest", "default", "forced"]


def candidates_of(
    problem: Problem, device: Device, options: Options, stored: bool = False
) -> Iterator[Candidate]:
    """The candidates that may serve a problem, best first.

    The caller's numbers alone where there are any; else the tuned config and static defaults.
    stored: sources may come from the directory of binaries, for whoever loads those.
    Raises ConfigError when the caller's numbers cannot run, with every reason.
    """
    if problem.structure.batch_invariant:
        fixed = _invariant(problem, device)
        yield Candidate(problem, device, fixed, "default", "batch-invariant", True, stored)
        return
    if options.overrides:
        forced = _forced(problem, device, options)
        yield Candidate(problem, device, forced, "forced", "kernel_options", True, stored)
        return
    seen = set()
    for each in open_candidates(problem, device, options, stored):
        config = options.compiled(each.config)
        if options.deterministic:
            found = family_of(config).made_deterministic(config, problem.structure)
            if found is None:
                continue
            # What was measured is another kernel.
            each, config = replace(each, measured=each.measured and found == config), found
        if config not in seen:
            seen.add(config)
            yield replace(each, config=config)


def _invariant(problem: Problem, device: Device) -> Config:
    """The one config of batch-invariant calls; raises ConfigError where no template has one."""
    kind = problem.structure.kind
    for family in families(kind, device) if not problem.structure.fp8 else ():
        config: Config | None = family.invariant(problem, device)
        if config is not None:
            return config
    raise ConfigError(
        f"BATCH_INVARIANT for {problem.describe()}",
        "Triton's prefill template alone is batch-invariant, and float8 queries are not its own",
        "pass q, k and v in bfloat16",
    )


def open_candidates(
    problem: Problem, device: Device, options: Options = NONE, stored: bool = False
) -> Iterator[Candidate]:
    """A record's config where there is one, then the static defaults."""
    wanted = options.language
    left: Iterator[Config] = iter(())
    known: list[Config] = []

    def first() -> Config:
        """The first static default; a record may ask for it before it has its turn."""
        nonlocal left
        if not known:
            left = candidates(problem, device, wanted)
            known.append(next(left))
        return known[0]

    def static() -> Iterator[Config]:
        yield first()
        yield from left

    found = _tuned(problem, device, first if wanted is None else None)
    if found is not None and wanted in (None, found.config.language):
        measured, config = not COMPILER_FIELDS.intersection(found.differing), found.config
        if not measured:
            config = family_of(config).of_this_compiler(config)
        yield Candidate(problem, device, config, found.how, found.origin, measured, stored)
    defaults: Iterable[Candidate] = _defaults(problem, device, static(), stored)
    exported = None
    if stored and current().binaries is not None:
        # Whoever exported kernels has compiled the candidates, and wrote the one that serves.
        defaults = list(defaults)
        exported = next((each for each in defaults if each.exported), None)
        if exported is not None:
            yield exported
    yield from (each for each in defaults if each is not exported)


def _defaults(
    problem: Problem, device: Device, static: Iterable[Config], stored: bool
) -> Iterator[Candidate]:
    for position, config in enumerate(static):
        origin = f"static default for {device.arch}"
        if position:
            origin += f", choice {position + 1}"
        yield Candidate(problem, device, config, "default", origin, False, stored)


def _tuned(problem: Problem, device: Device, first: Callable[[], Config] | None) -> Found | None:
    """The cached record; None for the interpreter, whose times nobody asks for."""
    if current().mode == "off" or device.backend == "interpreter":
        return None
    return find(problem, device, first)


def _forced(problem: Problem, device: Device, options: Options) -> Config:
    # Numbers without a backend are those that torch documents, of a Triton template.
    only: Language = "gluon" if problem.structure.fp8 else "triton"
    start = default(problem, device, options.language or only)
    config = options.apply(start)
    if options.exact is None and options.BLOCK_N is None and options.BLOCK_M is None:
        config = family_of(config).fit_to_mask(config, problem.structure)
    if options.exact is None:
        config = family_of(config).without_hints(config, problem.structure, device)
    found = reasons(config, problem.structure, device)
    if found:
        raise ConfigError(
            f"kernel_options ask for {config}",
            f"it cannot run here: {'; '.join(found)}",
            f"leave the choice open, or start from {start}",
        )
    return config


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for a problem: config, where it came from, rendered sources.

    how: from a tuned record (as flexattn.records.layers says it), the static default, or forced by
    the caller. origin: the same in words. attempts: the candidates that were tried, the one that
    serves last. kernels: built of the sources, in their order; none of what is only rendered.
    """

    problem: Problem
    device: Device
    config: Config
    how: _How
    origin: str
    source: Source
    combine: Source | None
    attempts: tuple[Attempt, ...] = ()
    kernels: tuple[Kernel, ...] = field(default=(), compare=False, repr=False)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The kernel, and decode's combine kernel."""
        return (self.source,) if self.combine is None else (self.source, self.combine)

    @property
    def merger(self) -> Kernel | None:
        """The kernel that merges splits, where there is one and it is built."""
        return self.kernels[1] if len(self.kernels) > 1 else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config that may serve a problem; nothing of it is rendered before it is asked for.

    measured: a tuner timed this compiler's kernel, or the caller insists on it: it serves whatever
    it spills. stored: sources may come from the directory of binaries.
    """

    problem: Problem
    device: Device
    config: Config
    how: _How
    origin: str
    measured: bool = False
    stored: bool = False

    @property
    def form(self) -> str:
        """The form of the template: candidates of one are one text with other numbers.

        A record's config is unlike the static defaults.
        """
        how = self.how
        return family_of(self.config).template(self.config) if how == "default" else how

    @property
    def tiles(self) -> Config:
        """The config without what says how it is compiled: equal for the same tiles of a form."""
        tiles: Config = family_of(self.config).uncompiled(self.config)
        return tiles

    @property
    def kernel(self) -> tuple[Structure, Config, Device, bool, bool]:
        """The facts from which its sources follow, and how they are judged."""
        config = family_of(self.config).as_rendered(self.config)
        return self.problem.structure, config, self.device, self.measured, self.stored

    def describe(self) -> str:
        """The template, the config, and where it comes from."""
        return f"{self.config.language} {describe(self.config)} ({self.origin})"

    @property
    def exported(self) -> bool:
        """True if its sources lie in the directory of binaries."""
        return bool(self._read())

    def _read(self) -> tuple[Source, ...]:
        root = current().binaries if self.stored else None
        if root is None:
            return ()
        key = self.problem.structure, self.config, self.device
        return builder().sources((root, *key), lambda: KernelStore(root).sources(*key))

    def choice(self) -> Choice:
        """The candidate with its sources, rendered or read.

        Their header names the first problem of its structure.
        """
        problem, config, device = self.problem, self.config, self.device
        family, structure = family_of(config), problem.structure
        title = f"{problem.describe()} for {device.arch}"
        source, *merges = self._read() or builder().sources(
            (structure, family.as_rendered(config), device),
            lambda: _rendered(structure, config, device, title),
        )
        combine = merges[0] if merges else None
        return Choice(problem, device, config, self.how, self.origin, source, combine)

    def sources(self) -> tuple[Source, ...]:
        """The kernel, then those that are launched with it; rendered when they are asked for."""
        return self.choice().sources


def _rendered(
    structure: Structure, config: Config, device: Device, title: str
) -> tuple[Source, ...]:
    """A kernel's sources; raises RenderError for one that does not read keys where they lie.

    A field of a structure whose name begins with keys_ says where keys lie, unless each has a row
    of K and V. A kernel whose text is the same without it reads such rows.
    """
    family = family_of(config)
    found = family.sources(structure, config, device, title)
    for each in fields(structure):
        if not each.name.startswith("keys_") or getattr(structure, each.name) == each.default:
            continue
        change: dict[str, Any] = {each.name: each.default}
        dense = replace(structure, **change)
        same = family.render(dense, config, device, title).hash == found[0].hash
        if same or skips_far(structure, config):
            raise RenderError(
                f"{each.name} of {describe(config)}",
                "its template reads keys as that field says, and no kernel looks for far keys",
                "add the piece to the template, or switch the rule decay_skip off",
            )
    return found


class Attempt(NamedTuple):
    """A candidate in words, with what became of it; None where nobody has tried it.

    remembered: an earlier call or process tried it.
    """

    candidate: str
    outcome: Outcome | None
    remembered: bool = False

    def __str__(self) -> str:
        """In one line."""
        if self.outcome is None:
            return f"{self.candidate}: not tried"
        return f"{self.candidate}: {self.outcome}{' (remembered)' * self.remembered}"
