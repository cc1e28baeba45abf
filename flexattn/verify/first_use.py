"""The check of a kernel's first launch: when it is due, and what follows from its verdict."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.device import Device
from flexattn.kernels.base.source import Source
from flexattn.records.store import renew
from flexattn.runtime.dispatch import Choice, dispatcher
from flexattn.runtime.outcomes import Outcome, compiler_of, is_verified, memory
from flexattn.settings import current, log, say_once
from flexattn.verify.gate import ErrorRow, Verdict
from flexattn.verify.samples import Unjudged, beyond


@dataclass(frozen=True, slots=True)
class LaunchedKernels:
    """Kernels that are launched together.

    sources: the one that attends first. described: the problem and the config as text, which only
    a check needs. outcome: of building them. tuned: they are a record's of this environment, which
    the tuner's gate passed.
    """

    sources: tuple[Source, ...]
    device: Device
    described: Callable[[], tuple[str, str]]
    outcome: Outcome
    tuned: bool = False

    @classmethod
    def of(cls, choice: Choice, merges: bool = True) -> LaunchedKernels:
        """What dispatch chose. merges: decode's second kernel is launched too."""
        sources: tuple[Source, ...] = (choice.source,)
        if merges and choice.combine is not None:
            sources += (choice.combine,)
        tried = choice.attempts[-1] if choice.attempts else None
        outcome = tried.outcome if tried is not None and tried.outcome is not None else None

        def described() -> tuple[str, str]:
            candidate = f"{choice.config} ({choice.origin})" if tried is None else tried.candidate
            return choice.problem.describe(), candidate

        return cls(
            sources, choice.device, described, outcome or Outcome("built"), choice.how == "hit"
        )

    @property
    def title(self) -> str:
        """The problem, for people."""
        return self.described()[0]

    @property
    def candidate(self) -> str:
        """The config, for people."""
        return self.described()[1]


def due(subject: LaunchedKernels) -> bool:
    """Whether a launch of these kernels is to be checked."""
    mode = current().verify
    if mode != "first":
        return mode == "always"
    if subject.tuned:
        return False
    return not all([is_verified(each, subject.device) for each in subject.sources])


def verification(subject: LaunchedKernels) -> str:
    """The verification of these kernels in words; empty if kernels are not checked."""
    if subject.tuned:
        return "by the tuner's gate, in this environment"
    if all([is_verified(each, subject.device) for each in subject.sources]):
        return "by its first launch"
    return "" if current().verify == "off" else "not yet"


def accepted(subject: LaunchedKernels, *ways: Callable[[], Verdict]) -> bool:
    """Check kernels, and remember the outcome; False where they compute wrong numbers.

    ways: functions that judge a launch, tried in turn until one can. A wrong kernel is reported
    once, with a file that describes it, and is never chosen again: the caller asks dispatch for
    the next one. A kernel that none of them can judge is used, and not recorded as verified.
    """
    verdict = None
    for judged in ways:
        try:
            with unseen():
                verdict = judged()
            break
        except Unjudged as reason:
            log.info("%s: the first launch cannot be judged: %s", subject.title, reason)
        except Exception as error:  # the check must not fail a call that it cannot check
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            say_once(f"{subject.title}: its kernel was not verified: {told}", logging.INFO)
    right = verdict is None or not beyond(verdict)
    if right:
        for source in subject.sources:
            memory().trust(source, subject.device)
            if verdict is not None:
                outcome = replace(subject.outcome, verified=True)
                memory().note(source, subject.device, outcome, subject.title)
        return True
    assert verdict is not None
    outcome = Outcome("wrong", _reason(verdict))
    memory().note(subject.sources[0], subject.device, outcome, subject.title)
    path = _report(subject, verdict)
    dispatcher.cache_clear()
    renew()
    say_once(
        f"{subject.title}: the kernel of {subject.candidate} {outcome} on "
        f"{subject.device.name}, by {_compiler(subject.device)}; it is not used, and another one "
        f"is. Please send {path} to the maintainers; FLEXATTN_VERIFY=off checks nothing"
    )
    return False


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """What runs inside is not seen by a caller's hooks on saved tensors and dispatch modes."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.no_grad(), hooks, _disable_current_modes():
        yield


def _reason(verdict: Verdict) -> str:
    """The worst of a verdict, in a line."""
    if verdict.faults:
        return verdict.faults[0]
    worst = max(verdict.rows, key=_used)
    return f"{worst.name} error {worst.error:.2g}, the gate's budget is {worst.budget:.2g}"


def _used(row: ErrorRow) -> float:
    return row.error / row.budget if row.error == row.error and row.budget else torch.inf


def _compiler(device: Device) -> str:
    try:
        return compiler_of(device)
    except Exception as error:  # the words for people must not hide what was found
        return f"a compiler that cannot be named ({type(error).__name__})"


def _report(subject: LaunchedKernels, verdict: Verdict) -> Path:
    """Write all that a maintainer needs to see the fault; returns the file."""
    path = current().cache_dir / "wrong" / f"{subject.sources[0].hash[:24]}.txt"
    import flexattn

    lines = [
        f"flexattn {flexattn.__version__}, torch {torch.__version__}, {_compiler(subject.device)}",
        f"{subject.device}",
        subject.title,
        subject.candidate,
        verdict.message(),
        *(each.text for each in subject.sources),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(lines))
    except OSError as error:
        say_once(f"{path} cannot be written: {error}")
    return path
