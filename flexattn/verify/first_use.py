"""The check of a kernel's first launch: sampled rows and keys, and what follows from a verdict."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.device import Device
from flexattn.kernels.base.source import Source
from flexattn.mods.expr import ScoreMod
from flexattn.problem import FP8, out_dtype
from flexattn.problem.inputs import NO_DESCALES, Descales, Dropout
from flexattn.records.store import renew
from flexattn.reference import Precision, Reference, SomeRows, attention
from flexattn.reference.parts import SavedForward, gradient_of_rows, gradients_of_keys
from flexattn.runtime.backward import Gradients
from flexattn.runtime.candidates import Choice
from flexattn.runtime.dispatch import dispatcher
from flexattn.runtime.launch import Outputs
from flexattn.runtime.outcomes import Outcome, compiler_of, memory
from flexattn.settings import current, log, say_once
from flexattn.verify.gate import (
    E4M3_SHARE,
    RMS_SHARE,
    Triple,
    Verdict,
    badness,
    judge,
    judge_named,
)

# A sample's error scatters more than that of a whole tensor, by which the gate's budget is set.
_MARGIN = 3.0
# Scores of the sampled rows of one head, which bound the memory of a check.
_SCORES = 2**20
_ROWS = 16
# The step of scores within which a mod that jumps may decide either way.
_NUDGE = 2.0**-18


class Unjudged(Exception):
    """Why a launch cannot be compared with plain torch on its own inputs."""


# A function that judges a launch, or raises Unjudged.
Way: TypeAlias = Callable[[], Verdict]


class Attended(NamedTuple):
    """A forward's inputs. score_mod, block_mask: as plain torch runs them."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    sinks: Tensor | None = None
    descales: Descales = NO_DESCALES
    dropout: Dropout | None = None
    e4m3_weights: bool = False


def beyond(verdict: Verdict) -> bool:
    """True if a sample's error is more than rounding."""
    return bool(verdict.faults) or any(
        not row.error <= _MARGIN * row.budget for row in verdict.rows
    )


def judge_rows(call: Attended, got: Outputs, borders: Sequence[int]) -> Verdict:
    """The verdict on rows of four heads: both ends, borders of blocks, some at random.

    borders: sizes of blocks of rows. Raises Unjudged where the inputs or the oracle's rows are not
    finite, or where a mod reads outside of a tensor.
    """
    B, Hq, L, _ = call.q.shape
    draw = torch.Generator("cpu").manual_seed(0)
    b, h = _some(B, draw), _some(Hq, draw)
    most = max(1, _SCORES // (call.k.shape[2] * len(b) * len(h)))
    rows = sampled_positions(L, borders, min(_ROWS, most), draw)
    where = call.q.device
    at = SomeRows(b.to(where), h.to(where), rows.to(where), Hq)
    q = at.of(call.q)
    _need_finite(call.q, call.k, call.v)
    sinks = None if call.sinks is None else call.sinks[at.h]

    def run(precision: Precision, scale: float = call.scale) -> Reference:
        return attention(
            q, call.k, call.v, score_mod=call.score_mod, block_mask=call.block_mask, scale=scale,
            sinks=sinks, descales=call.descales, dropout=call.dropout, precision=precision, at=at,
        )  # fmt: skip

    exact, rounded = run(Precision.ORACLE), run(Precision.ROUNDED)
    sound = _sound(exact) & _sound(rounded)
    if not bool(sound.any()):
        raise Unjudged("rows of plain torch are not finite")
    mine = [None if x is None else at.of(x)[sound] for x in got]
    dtype, share = out_dtype(q.dtype), E4M3_SHARE if call.e4m3_weights else RMS_SHARE

    def against(reference: Reference) -> Verdict:
        return judge((mine[0], mine[1], mine[2]), of(exact), of(reference), dtype, share)

    def of(found: Reference) -> Triple:
        return found.out[sound], found.lse[sound], found.max_scores[sound]

    verdict = against(rounded)
    if not beyond(verdict):
        return verdict
    # A mod that compares scores may jump elsewhere by a kernel's rounding.
    nudged = [run(Precision.STORED, call.scale * (1 + step)) for step in (_NUDGE, -_NUDGE)]
    return min([verdict, *map(against, nudged)], key=badness)


def judge_gradients(
    saved: SavedForward,
    got: Gradients,
    borders: tuple[Sequence[int], Sequence[int]],
) -> Verdict:
    """The verdict on dq of some rows, dk and dv of some keys; those of captured tensors are not
    judged here.

    borders: sizes of blocks of rows, and of keys. Raises Unjudged as `judge_rows`.
    """
    (B, Hq, L, _), (Bk, Hkv, S, _) = saved.q.shape, saved.k.shape
    draw, device = torch.Generator("cpu").manual_seed(0), saved.q.device
    _need_finite(saved.q, saved.k, saved.v, saved.out, saved.dout)
    b, h, kb, kv = (_some(n, draw).to(device) for n in (B, Hq, Bk, Hkv))
    rows = sampled_positions(L, borders[0], _ROWS, draw).to(device)
    keys = sampled_positions(S, borders[1], _ROWS, draw).to(device)
    at = SomeRows(b, h, rows, Hq)

    def of_keys(x: Tensor) -> Tensor:
        return x[kb[:, None, None], kv[:, None], keys]

    def plain(precision: Precision) -> dict[str, Tensor]:
        dk, dv = gradients_of_keys(saved, kb, kv, keys, precision)
        return {"dq": gradient_of_rows(saved, at, precision), "dk": dk, "dv": dv}

    mine = {"dq": at.of(got.dq), "dk": of_keys(got.dk), "dv": of_keys(got.dv)}
    exact, rounded = plain(Precision.ORACLE), plain(Precision.ROUNDED)
    rounded = {name: x.to(mine[name].dtype) for name, x in rounded.items()}
    if not all(bool(x.isfinite().all()) for x in (*exact.values(), *rounded.values())):
        raise Unjudged("a gradient of plain torch is not finite")
    return judge_named(mine, exact, rounded)


def sampled_positions(
    length: int, borders: Iterable[int], most: int, draw: torch.Generator
) -> Tensor:
    """Some of range(length), sorted: both ends, both sides of a block's first and last border."""
    wanted = [0, length - 1]
    for size in borders:
        last = (length - 1) // size * size
        wanted += [last - 1, last, size - 1, size]
    found = dict.fromkeys(each for each in wanted if 0 <= each < length)
    extra = torch.randint(length, (most,), generator=draw, device="cpu").tolist()
    chosen = list(dict.fromkeys([*list(found)[: max(most - 3, 1)], *extra]))[:most]
    return torch.tensor(sorted(chosen), device="cpu")


def _some(count: int, draw: torch.Generator) -> Tensor:
    """The last of `count` batches or heads, and one at random."""
    other = int(torch.randint(count, (), generator=draw, device="cpu"))
    return torch.tensor(sorted({other, count - 1}), device="cpu")


def _sound(found: Reference) -> Tensor:
    """The rows with a finite output, and an lse that is finite or -inf (a row without keys)."""
    return found.out.isfinite().all(-1) & ~found.lse.isnan() & (found.lse != torch.inf)


def _need_finite(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype.itemsize == 1:  # of eight bits these are NaN, and e5m2's infinities
            finite = (x.view(torch.uint8) & 0x7F).amax() < (0x7F if x.dtype in FP8 else 0x7C)
        else:  # nothing is allocated, and NaN goes through
            least, most = torch.aminmax(x)
            finite = least.isfinite() & most.isfinite()
        if not bool(finite):
            raise Unjudged("an input holds numbers that are not finite")


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
        """The kernels of a choice. merges: decode's second kernel is launched too."""
        sources = choice.sources if merges else (choice.source,)
        tried = choice.attempts[-1] if choice.attempts else None
        outcome = (tried and tried.outcome) or Outcome("built")

        def described() -> tuple[str, str]:
            candidate = f"{choice.config} ({choice.origin})" if tried is None else tried.candidate
            return choice.problem.describe(), candidate

        return cls(sources, choice.device, described, outcome, choice.how == "hit")

    @property
    def verified(self) -> bool:
        """True if this process or an earlier one verified all of them."""
        return all([memory().verified(each, self.device) for each in self.sources])

    @property
    def title(self) -> str:
        """The problem, for people."""
        return self.described()[0]

    @property
    def candidate(self) -> str:
        """The config, for people."""
        return self.described()[1]


def _due(subject: LaunchedKernels) -> bool:
    """True if a launch of these kernels is to be checked."""
    mode = current().verify
    if mode != "first":
        return mode == "always"
    if subject.tuned:
        return False
    return not subject.verified


def verification(subject: LaunchedKernels) -> str:
    """The verification of these kernels in words; empty if kernels are not checked."""
    if subject.tuned:
        return "by the tuner's gate, in this environment"
    if subject.verified:
        return "by its first launch"
    return "" if current().verify == "off" else "not yet"


def accepted(subject: LaunchedKernels, ways: Iterable[Way]) -> bool:
    """Check kernels where it is due, and keep the outcome; False where they compute wrong numbers.

    ways: read where a check is due; tried in turn until one can judge. A wrong kernel is reported
    once, with a file that describes it, and is never chosen again: the caller asks dispatch for
    the next one. A kernel that none of them can judge is used, and not recorded as verified.
    """
    if not _due(subject):
        return True
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
    dispatcher().clear()
    renew()
    say_once(
        f"{subject.title}: the kernel of {subject.candidate} {outcome} on "
        f"{subject.device.name}, by {_compiler(subject.device)}; it is not used, and another one "
        f"is. Please send {path} to the maintainers; FLEXATTN_VERIFY=off checks nothing"
    )
    return False


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """A caller's hooks on saved tensors and dispatch modes see nothing of what runs inside."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.no_grad(), hooks, _disable_current_modes():
        yield


def _reason(verdict: Verdict) -> str:
    """The worst of a verdict, in a line."""
    if verdict.faults:
        return verdict.faults[0]
    worst = max(verdict.rows, key=lambda row: row.used)
    return f"{worst.name} error {worst.error:.2g}, the gate's budget is {worst.budget:.2g}"


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
