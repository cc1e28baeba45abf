"""Problem -> Choice: the first candidate that builds, loads and spills little; remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NoReturn

from flexattn.device import Device
from flexattn.errors import (
    BuildError,
    ConfigError,
    FlexAttnError,
    RenderError,
    WrongKernelError,
)
from flexattn.kernels.base.source import Source
from flexattn.kernels.choose.options import Options
from flexattn.mods.expr import pretty
from flexattn.problem import Problem
from flexattn.records.store import generation
from flexattn.runtime.build import Builder, Kernel, RenderAnew, builder
from flexattn.runtime.candidates import Attempt, Candidate, Choice, candidates_of
from flexattn.runtime.outcomes import (
    Memory,
    Outcome,
    concerns_the_device,
    memory,
    outcome_of,
    too_large,
)
from flexattn.runtime.resources import loop_spills, loop_spills_amd
from flexattn.settings import current, log, say_once
from flexattn.util.locks import Lru

# Kernels that are compiled for a call because those before them spill: about a second each.
MAX_SPILLED = 4
_Build = Callable[[Source], Kernel]


class Dispatcher:
    """The in-memory table: problem and options to a choice with its kernels."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._table: Lru[object, Choice] = Lru(4096)
        # What the first candidate of a problem gave, for others with the same first candidate.
        self._served: Lru[object, Choice] = Lru(1024)

    def clear(self) -> None:
        """Choose anew from now on; kernels stay built."""
        self._table.clear()
        self._served.clear()

    def choose(self, problem: Problem, device: Device, index: int, options: Options) -> Choice:
        """The choice for a problem, whose kernels are built if need be."""
        settings = current()
        places = settings.mode, settings.cache, settings.cache_dir, generation()
        key = (problem.bucketed(), device, index, options, places)
        found = self._table.get(key)
        if found is None:
            found = self._new(problem, device, index, options)
            self._table.put(key, found)
        return found if found.problem == problem else replace(found, problem=problem)

    def _new(self, problem: Problem, device: Device, index: int, options: Options) -> Choice:
        try:
            choice = self._built(problem, device, index, options, stored=True)
        except RenderAnew:
            choice = self._built(problem, device, index, options, stored=False)
        if current().debug >= 1:
            log.debug("%s -> %s (%s)", problem.describe(), choice.config, choice.origin)
        if current().debug >= 3:
            for captures in (problem.structure.score, problem.structure.mask):
                if captures is not None:
                    log.debug("%s_mod:\n%s", captures.mod.kind, pretty(captures.mod.expr))
        return choice

    def _built(
        self, problem: Problem, device: Device, index: int, options: Options, stored: bool
    ) -> Choice:
        def build(source: Source) -> Kernel:
            return self._build.kernel(source, device, index)

        others = candidates_of(problem, device, options, stored)
        first = next(others, None)
        if first is None:
            return first_served((), problem, device, build, memory())
        key = first.kernel, index, current().binaries
        known = self._served.get(key)
        if known is not None:
            attempt = known.attempts[0]._replace(candidate=first.describe())
            return replace(
                known, problem=problem, config=first.config, how=first.how, origin=first.origin,
                attempts=(attempt,),
            )  # fmt: skip
        found = first_served(chain((first,), others), problem, device, build, memory())
        if len(found.attempts) == 1:
            self._served.put(key, found)
        return found


def chosen(
    problem: Problem,
    device: Device,
    options: Options,
    build: _Build,
    known: Memory | None = None,
    stored: bool = False,
) -> Choice:
    """The choice that serves, with its kernels, built by `build`.

    known: outcomes of earlier builds; None compiles whatever was refused before. Raises as
    `first_served`, and ConfigError as `candidates_of`.
    """
    candidates = candidates_of(problem, device, options, stored)
    return first_served(candidates, problem, device, build, known)


def first_served(
    candidates: Iterable[Candidate],
    problem: Problem,
    device: Device,
    build: _Build,
    known: Memory | None,
) -> Choice:
    """The first candidate that builds, loads, and whose loops spill little, with its kernels.

    Of those that all spill, the one that spills least, of at most four that are compiled for it.
    known: skips what is known to be refused or to spill. Raises BuildError with every candidate's
    reason where none serves; a lone candidate's own error; the first one's under
    FLEXATTN_STRICT=1; and what the driver says of the device itself.
    """
    title = problem.describe()
    # The first mostly serves, and of a new length the others would be listed for nothing.
    others = iter(candidates)
    left = list(islice(others, 1))
    attempts: list[Attempt] = []
    spilled: list[tuple[int, int, Candidate]] = []
    while left:
        candidate = left.pop(0)
        chance = _Chance(build, device, title, known)
        try:
            kernels, outcome = chance.take(candidate)
        except _Failed as failed:
            outcome = failed.outcome
            left += others
            alone = not (left or attempts)
            if failed.error is not None and (alone or (_strict(outcome) and not attempts)):
                raise failed.error from failed.error.__cause__
            if _strict(outcome) and not attempts:
                _refused_before(candidate, outcome, title)
        else:
            if candidate.measured or not outcome.starved:
                attempts.append(Attempt(candidate.describe(), outcome, chance.remembered))
                _say(title, attempts)
                return _served(candidate, kernels, attempts)
        left += others
        attempts.append(Attempt(candidate.describe(), outcome, chance.remembered))
        if outcome.built:
            spilled.append((outcome.loop_spills, len(spilled), candidate))
        left = [] if len(spilled) == MAX_SPILLED else _next(left, candidate, outcome)
    for _, _, candidate in sorted(spilled, key=lambda each: each[:2]):
        try:
            kernels, outcome = _Chance(build, device, title, None).take(candidate)
        except _Failed as failed:
            attempts.append(Attempt(candidate.describe(), failed.outcome))
            continue
        attempts.append(Attempt(f"{candidate.describe()}, which spills least", outcome))
        _say(title, attempts)
        return _served(candidate, kernels, attempts)
    _give_up(title, device, attempts)


def _served(
    candidate: Candidate, kernels: tuple[Kernel, ...], attempts: Sequence[Attempt]
) -> Choice:
    choice = candidate.choice()
    origin = choice.origin
    if len(attempts) > 1:
        origin += f"; before it {attempts[0]}"
    return replace(choice, origin=origin, attempts=tuple(attempts), kernels=kernels)


class _Failed(Exception):
    """The outcome of a candidate that does not serve, and the error where it was tried now."""

    def __init__(self, outcome: Outcome, error: Exception | None = None) -> None:
        self.outcome, self.error = outcome, error


@dataclass
class _Chance:
    """One try of one candidate. remembered: its outcome was known."""

    build: _Build
    device: Device
    title: str
    memory: Memory | None
    remembered: bool = False

    def take(self, candidate: Candidate) -> tuple[tuple[Kernel, ...], Outcome]:
        """Its kernels, none where it is known to spill; raises _Failed."""
        kernels: list[Kernel] = []
        worst = Outcome("built")
        for source in self._sources(candidate):
            known = None
            if self.memory is not None:
                found = self.memory.wrong if source.stored else self.memory.find
                known = found(source, self.device)
            if known is not None and not known.built:
                self.remembered = True
                raise _Failed(known)
            judged = not (candidate.measured or source.stored)
            if known is not None and known.starved and judged:
                self.remembered = True
                return (), known
            kernel = self._built(source)
            if judged:
                outcome = known or self._spills(kernel, source)
                worst = max(worst, outcome, key=lambda each: each.loop_spills)
            kernels.append(kernel)
        return tuple(kernels), worst

    def _sources(self, candidate: Candidate) -> tuple[Source, ...]:
        try:
            return candidate.sources()
        except Exception as error:  # one template's fault must not keep another from serving
            if isinstance(error, FlexAttnError) and not isinstance(error, RenderError):
                raise  # the caller's: another template would say the same
            wrong = RenderError(f"{candidate.describe()}: {type(error).__name__}: {error}")
            raise _Failed(outcome_of(error), wrong) from error

    def _built(self, source: Source) -> Kernel:
        try:
            kernel = self.build(source)
        except (BuildError, RenderError, MemoryError, OSError) as error:
            if concerns_the_device(error):
                raise
            self._fail(source, outcome_of(error), error)
        if kernel.shared_memory > self.device.shared_memory:
            self._fail(source, too_large(kernel.shared_memory, self.device.shared_memory))
        return kernel

    def _fail(self, source: Source, outcome: Outcome, error: Exception | None = None) -> NoReturn:
        if self.memory is not None and not source.stored:
            self.memory.note(source, self.device, outcome, self.title)
        raise _Failed(outcome, error)

    def _spills(self, kernel: Kernel, source: Source) -> Outcome:
        """The outcome with the loops' spills; it is stored if the binary was disassembled."""
        try:
            spills, code, stack = spills_of(kernel)
        except (BuildError, ValueError) as error:
            say_once(f"nobody can tell what kernels spill: {error}")
            return Outcome("built")
        outcome = Outcome("built", "", spills, stack, code)
        if outcome.disassembled and self.memory is not None:
            self.memory.note(source, self.device, outcome, self.title)
        return outcome


def spills_of(kernel: Kernel) -> tuple[int, int, int]:
    """The spills of a kernel that was built, as `loop_spills` has them; zeros in the
    interpreter.
    """
    if kernel.binary is not None:
        return loop_spills(kernel.binary.code)
    text = getattr(kernel.compiled, "asm", {})
    if "cubin" in text:
        return loop_spills(text["cubin"])
    if "amdgcn" in text:
        return loop_spills_amd(text["amdgcn"])
    return 0, 0, 0


def _next(left: Sequence[Candidate], failed: Candidate, outcome: Outcome) -> list[Candidate]:
    """The other candidates to try, in order, after one did not serve.

    What spills: the last tiles of its form, which have the most registers left, then the next
    form. What the compiler refuses in a text it refuses with other numbers in it: the next form's
    turn, or of the last form its last, which is the smallest; where a pass or a ptxas may be at
    fault the same tiles are first compiled otherwise. What does not fit: the next.
    """
    if not (outcome.built or outcome.of_text):
        return list(left)
    same = [each for each in left if each.form == failed.form]
    others = [each for each in left if each.form != failed.form]
    alike = [each for each in same if each.tiles == failed.tiles]
    smaller = [each for each in same if each.tiles != failed.tiles]
    smallest = [each for each in smaller if each.tiles == smaller[-1].tiles]
    if outcome.built:
        return [*smallest[:1], *others] if others else list(left)
    return [*(alike if outcome.of_assembly else ()), *(others or smallest[:1])]


def _strict(outcome: Outcome) -> bool:
    """True if a first candidate's failure is an error.

    An estimate of shared memory that was too low is no failure: it is what smaller tiles are for.
    """
    return current().strict and outcome.kind != "shared memory"


def _refused_before(candidate: Candidate, outcome: Outcome, title: str) -> NoReturn:
    raise BuildError(
        f"{title}: {candidate.describe()}: {outcome}",
        "FLEXATTN_STRICT=1: the first candidate serves",
        "`flexattn doctor --clear-outcomes` compiles it anew; unset FLEXATTN_STRICT for the next",
    )


def _say(title: str, attempts: Sequence[Attempt]) -> None:
    """A line of log for each candidate that gave way; a warning for what was refused just now."""
    serving = attempts[-1].candidate
    for each in attempts[:-1]:
        text = f"{title}: {each}; {serving} serves instead"
        if each.remembered or each.outcome is None or each.outcome.built:
            log.info(text)
        else:
            say_once(text)


def _give_up(title: str, device: Device, attempts: Sequence[Attempt]) -> NoReturn:
    listed = "\n        ".join(map(str, attempts)) or "there is none"
    outcomes = [each.outcome for each in attempts if each.outcome is not None]
    if any(each.kind == "wrong" for each in outcomes):
        raise WrongKernelError(
            f"{title}: no kernel is right on {device.name}\n        {listed}",
            "a kernel's first launch agrees with plain torch",
            "send the files that were named; `flexattn doctor --clear-outcomes` checks anew",
        )
    if outcomes and all(each.kind == "shared memory" for each in outcomes):
        raise ConfigError(
            f"{title}: every config needs more shared memory than {device.shared_memory} bytes\n"
            f"        {listed}",
            "the tiles of K, V and of what the mods load fit in shared memory",
            "pass kernel_options with smaller BLOCK_M and BLOCK_N, or num_stages=1",
        )
    raise BuildError(
        f"{title}: no kernel can be built for {device.name}\n        {listed}",
        "one of a problem's candidates builds and loads",
        "report it with the mods; `flexattn doctor` shows the compiler and what it refused",
    )


def told(candidates: Iterable[Candidate], device: Device, memory: Memory) -> list[Attempt]:
    """The known outcomes of candidates, without compiling any."""
    found = []
    for candidate in candidates:
        try:
            outcomes = [memory.find(source, device) for source in candidate.sources()]
        except RenderError as error:
            outcomes = [outcome_of(error)]
        known = [each for each in outcomes if each is not None]
        worst = min(known, key=lambda each: (each.built, -each.loop_spills), default=None)
        found.append(Attempt(candidate.describe(), worst, worst is not None))
    return found


_dispatcher = Dispatcher(builder())


def dispatcher() -> Dispatcher:
    """The process's dispatcher."""
    return _dispatcher
