"""Time per call of several candidates, interleaved so that a drifting machine drifts for all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from flexattn.errors import InputError

__all__ = ["Failure", "Ratio", "Samples", "paired_ratio", "time_interleaved"]

Call = Callable[[], object]
_cuda: Any = torch.cuda  # its streams, events and graphs carry no types

MAX_CALLS_PER_SAMPLE = 200  # fewer than the driver queues: the host runs ahead of the GPU
WARMUP_CALLS = 3
CONFIDENCE = 0.95
MIN_FLUSH_BYTES = 64 << 20
LEAD_CYCLES = 400_000  # about 200 us of a GPU's clock


@dataclass(frozen=True)
class Failure:
    """Why a candidate has no time: the stage it broke in and the exception it raised."""

    stage: Literal["prepare", "run"]
    error: str
    message: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}: {self.message}"


@dataclass(frozen=True)
class Samples:
    """Microseconds per call of one candidate, one value a round in the order of the rounds.

    A candidate that failed has no values: `us` is empty, `median` and `spread` are NaN, and
    `failure` says why. Each value is the mean of `calls` calls.
    """

    us: tuple[float, ...] = ()
    failure: Failure | None = None
    calls: int = 0

    @property
    def median(self) -> float:
        """Median of the rounds, in microseconds."""
        return statistics.median(self.us) if self.us else math.nan

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        if len(self.us) < 2:
            return 0.0 if self.us else math.nan
        low, _, high = statistics.quantiles(self.us, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True)
class Ratio:
    """Median of per-round ratios, with an interval of order statistics that covers it at 95 %."""

    value: float
    low: float
    high: float
    rounds: int


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Time of `a` over time of `b`, round by round: above 1, `b` is the faster.

    Both must come from one call of `time_interleaved`. With fewer than six rounds no order
    statistic reaches 95 %, and the interval is the whole range. A failed side makes the ratio NaN.
    """
    if a.failure or b.failure:
        return Ratio(math.nan, math.nan, math.nan, 0)
    if len(a.us) != len(b.us) or not a.us:
        raise InputError(
            f"{len(a.us)} and {len(b.us)} rounds cannot be paired",
            "both sides have the same rounds, and at least one",
            "take both samples from one call of time_interleaved",
        )
    ratios = sorted(x / y for x, y in zip(a.us, b.us, strict=True))
    skip = _ranks_outside(len(ratios))
    return Ratio(statistics.median(ratios), ratios[skip], ratios[-1 - skip], len(ratios))


def _ranks_outside(n: int) -> int:
    """How many of n values may be cut at each end while the rest covers the median at 95 %."""
    tail, cut = 0.0, 0
    while cut < n // 2:
        tail += math.comb(n, cut) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        cut += 1
    return max(cut - 1, 0)


def time_interleaved(
    candidates: Mapping[str, Call],
    *,
    rounds: int,
    min_ms: float,
    flush_l2: bool,
    graph: bool,
    clock: Literal["cuda", "cpu"] = "cuda",
) -> dict[str, Samples]:
    """Time every candidate once a round, in an order that rotates and reverses; keep all rounds.

    A value is the mean time of as many calls as fill `min_ms`. `flush_l2` evicts the L2 cache
    before each call, outside the timed region. `graph` captures each candidate in a CUDA graph and
    times its replay: what the kernels cost, without the host. The "cpu" clock knows neither.
    A candidate that raises keeps its Failure and leaves the race; the others go on.
    Raises InputError for a combination that cannot be timed.
    """
    if rounds < 1 or min_ms < 0 or (clock == "cpu" and (flush_l2 or graph)):
        raise InputError(
            f"{rounds=}, {min_ms=}, {flush_l2=}, {graph=}, {clock=}",
            "rounds >= 1, min_ms >= 0, and the cpu clock has neither an L2 flush nor graphs",
        )
    stopwatch: _Clock = _CudaClock(flush_l2, graph) if clock == "cuda" else _CpuClock()
    runs = {name: _Run(call) for name, call in candidates.items()}
    for run in runs.values():
        run.prepare(stopwatch, min_ms * 1e3)
    for names in _orders(list(runs), rounds):
        for name in names:
            runs[name].sample(stopwatch)
    return {name: run.result() for name, run in runs.items()}


def _orders(names: list[str], rounds: int) -> Iterator[list[str]]:
    """One order a round: every name leads equally often, and every pair stands in both orders."""
    for r in range(rounds):
        shift = (r // 2) % len(names) if names else 0
        order = names[shift:] + names[:shift]
        yield order[::-1] if r % 2 else order


@dataclass
class _Run:
    """A candidate on its way through the rounds."""

    call: Call
    calls: int = 1
    us: list[float] = field(default_factory=list)
    failure: Failure | None = None

    def prepare(self, clock: _Clock, min_us: float) -> None:
        with self._failing("prepare"):
            self.call = clock.prepare(self.call)
            clock.sample(self.call, 1)
            estimate = max(clock.sample(self.call, WARMUP_CALLS), 1e-3)
            self.calls = min(max(math.ceil(min_us / estimate), 1), MAX_CALLS_PER_SAMPLE)

    def sample(self, clock: _Clock) -> None:
        if self.failure is None:
            with self._failing("run"):
                self.us.append(clock.sample(self.call, self.calls))

    def result(self) -> Samples:
        if self.failure:
            return Samples(failure=self.failure)
        return Samples(tuple(self.us), calls=self.calls)

    @contextmanager
    def _failing(self, stage: Literal["prepare", "run"]) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.failure = Failure(stage, type(e).__name__, str(e))


class _Clock(Protocol):
    def prepare(self, call: Call) -> Call:
        """Warm `call` up and return what is to be timed."""

    def sample(self, call: Call, calls: int) -> float:
        """Mean microseconds of `calls` calls."""


class _CpuClock:
    def prepare(self, call: Call) -> Call:
        call()
        return call

    def sample(self, call: Call, calls: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls / 1e3


class _CudaClock:
    def __init__(self, flush_l2: bool, graph: bool) -> None:
        self.graph = graph
        self.buffer: torch.Tensor | None = None
        if flush_l2:
            l2 = _cuda.get_device_properties(_cuda.current_device()).L2_cache_size
            self.buffer = torch.empty(
                max(2 * l2, MIN_FLUSH_BYTES), dtype=torch.int8, device="cuda"
            )

    def prepare(self, call: Call) -> Call:
        side = _cuda.Stream()  # capture needs a warm-up outside the default stream
        side.wait_stream(_cuda.current_stream())
        with _cuda.stream(side):
            for _ in range(WARMUP_CALLS):
                call()
        _cuda.current_stream().wait_stream(side)
        _cuda.synchronize()
        if not self.graph:
            return call
        captured = _cuda.CUDAGraph()
        with _cuda.graph(captured):
            call()
        replay: Call = captured.replay
        return replay

    def sample(self, call: Call, calls: int) -> float:
        pairs = calls if self.buffer is not None else 1
        events = [
            (_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True))
            for _ in range(pairs)
        ]
        _cuda.synchronize()
        # The GPU waits while the host queues the first calls: their launches are not its time.
        _cuda._sleep(LEAD_CYCLES)
        for begin, end in events:
            if self.buffer is not None:
                self.buffer.zero_()
            begin.record()
            for _ in range(calls // pairs):
                call()
            end.record()
        _cuda.synchronize()
        total_ms: float = sum(begin.elapsed_time(end) for begin, end in events)
        return total_ms / calls * 1e3
