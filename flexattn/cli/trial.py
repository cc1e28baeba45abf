"""One workload of the demo: a small space through the gate, then in a race with torch's kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from flexattn.attention import flex_attention, make_call
from flexattn.cli.offline import kernel_options, nearest, short
from flexattn.cli.workloads import Inputs, Workload
from flexattn.errors import FlexAttnError
from flexattn.measure.slices import Slices
from flexattn.measure.timing import Samples, time_interleaved
from flexattn.plan import plan

TORCH = "torch"


@dataclass(frozen=True)
class Variant:
    """One config of ours: its gate's verdict, and its time where it was timed."""

    config: str
    passed: bool
    note: str = ""
    us: float = math.nan


@dataclass(frozen=True)
class Trial:
    """What one workload showed; the first variant is what a plain call runs.

    error, budget: the largest of `out` in the slice that uses most of its budget.
    """

    workload: str
    shape: str
    variants: tuple[Variant, ...]
    error: float
    budget: float
    torch_us: float = math.nan
    torch_note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the plain call's gate is green, and no variant's is red."""
        return bool(self.variants) and all(variant.passed for variant in self.variants)

    @property
    def best(self) -> Variant:
        """The fastest variant that passed, or the first where nothing was timed."""
        timed = [v for v in self.variants if v.passed and not math.isnan(v.us)]
        return min(timed, key=lambda v: v.us, default=self.variants[0])


@dataclass(frozen=True)
class Effort:
    """How many configs a workload tries, for how many seconds, and whether they are timed."""

    configs: int
    seconds: float
    clock: Literal["cuda", "cpu"] | None
    rounds: int = 10
    min_ms: float = 4.0


def run(
    workload: Workload,
    device: str,
    dtype: torch.dtype,
    effort: Effort,
    say: Callable[[str], None],
) -> Trial:
    """Gate each config of the small space, then time those that passed beside torch.

    A config that is too large for the device is left out; only its note remains.
    """
    with torch.no_grad():
        x = workload.make(device, dtype)
        slices = Slices.of(x.q, x.k, x.v, x.score_mod, x.mask_mod)
        variants, calls, worst = _gated(workload, x, slices, effort, say)
        samples: dict[str, Samples] = {}
        if effort.clock is not None and all(variant.passed for variant in variants):
            say(f"{workload.name}: torch compiles its kernel, then the race")
            samples = _race({**calls, TORCH: _rival(x)}, workload, effort)
    rival = samples.get(TORCH, Samples())
    return Trial(
        workload.name,
        workload.describe(),
        tuple(_timed(variant, samples.get(variant.config)) for variant in variants),
        *worst,
        rival.median,
        str(rival.failure or ""),
    )


def _gated(
    workload: Workload, x: Inputs, slices: Slices, effort: Effort, say: Callable[[str], None]
) -> tuple[list[Variant], dict[str, Callable[[], Any]], tuple[float, float]]:
    """Every config's verdict, the calls that passed, and the default's error beside its budget."""
    launch = plan(
        make_call(x.q, x.k, x.v, x.score_mod, x.block_mask, None, True, False, None, None)
    ).launch
    begin = time.perf_counter()
    configs = nearest(launch.problem, launch.choice.device, launch.choice.config, effort.configs)
    variants: list[Variant] = []
    calls: dict[str, Callable[[], Any]] = {}
    worst = (math.nan, math.nan)
    for config in configs:
        if variants and time.perf_counter() - begin > effort.seconds:
            break
        name = short(config)
        say(f"{workload.name}: config {len(variants) + 1} of {effort.configs}, {name}")
        call = _ours(x, kernel_options(config) if variants else None)
        try:
            torch.full_like(x.q, math.nan)  # unwritten output then shows as NaN
            verdict = slices.judge(call())
        except FlexAttnError as error:
            # Only the plain call must run; a variant may be too large for this device.
            variants.append(Variant(name, bool(variants), error.got))
            continue
        if not variants and verdict.rows:
            worst = verdict.rows[0].error, verdict.rows[0].budget
        variants.append(Variant(name, verdict.passed, "" if verdict.passed else verdict.message()))
        calls[name] = call
    return variants, calls, worst


def _ours(x: Inputs, options: dict[str, int | bool] | None) -> Callable[[], Any]:
    return partial(
        flex_attention,
        x.q,
        x.k,
        x.v,
        score_mod=x.score_mod,
        block_mask=x.block_mask,
        enable_gqa=True,
        kernel_options=options,
    )


def _rival(x: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import flex_attention as torchs

    compiled: Callable[..., Any] = torch.compile(torchs, dynamic=False)
    return partial(
        compiled, x.q, x.k, x.v, score_mod=x.score_mod, block_mask=x.block_mask, enable_gqa=True
    )


def _race(
    calls: dict[str, Callable[[], Any]], workload: Workload, effort: Effort
) -> dict[str, Samples]:
    """Decode is timed as a server runs it: graph replays, with keys that are not in the cache."""
    assert effort.clock is not None
    cold = workload.decodes and effort.clock == "cuda"
    return time_interleaved(
        calls,
        rounds=effort.rounds,
        min_ms=effort.min_ms,
        flush_l2=cold,
        graph=cold,
        clock=effort.clock,
    )


def _timed(variant: Variant, samples: Samples | None) -> Variant:
    if samples is None:
        return variant
    note = variant.note or str(samples.failure or "")
    return Variant(variant.config, variant.passed, note, samples.median)
