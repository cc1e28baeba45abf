"""Time per call of several candidates, interleaved so that a drifting machine drifts for all.

A Clock is the GPU's own events or the host's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flexattn.errors import InputError, MeasureError
from flexattn.measure.process import failed
from flexattn.records.record import Failed, is_time

TimedCall = Callable[[], object]
_cuda: Any = torch.cuda  # its streams, events and graphs carry no types

WARMUP_CALLS = 3
MIN_FLUSH_BYTES = 128 << 20
LEAD_CYCLES = 400_000  # about 200 us of a GPU's clock
# An idle GPU lowers its clocks and takes tens of milliseconds of work to raise them again.
WARM_SECONDS = 0.1
IDLE_SECONDS = 0.5
WARM_SIZE = 4096


class CpuClock:
    """The host's clock: warms the device and calls up, then times calls."""

    def warm(self) -> None:
        """Work until the device runs at its full clocks: the host needs none."""

    def prepare(self, call: TimedCall) -> TimedCall:
        """Warm `call` up and return what is to be timed."""
        call()
        return call

    def sample(self, call: TimedCall, calls: int) -> float:
        """Mean microseconds of `calls` calls."""
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls / 1e3


class CudaClock(CpuClock):
    """A GPU's events, on the current device.

    flush_l2: other memory is read into the L2 cache before each call, outside the timed region.
    It is read and not written: lines that were written are brought to memory when a call needs
    their place, 9 us of 78 for 268 MB on an H200, which is no work of the call. graph: calls are
    captured once in CUDA graphs, which share one pool of memory, and their replays are timed.
    """

    def __init__(self, flush_l2: bool, graph: bool) -> None:
        self.graph = graph
        self.buffer: torch.Tensor | None = None
        if flush_l2:
            l2 = _cuda.get_device_properties(_cuda.current_device()).L2_cache_size
            self.buffer = torch.zeros(
                max(4 * l2, MIN_FLUSH_BYTES) // 4, dtype=torch.float32, device="cuda"
            )
        self._pool: Any = None
        self._captured: dict[TimedCall, TimedCall] = {}
        self._last = -IDLE_SECONDS

    def warm(self) -> None:
        """As CpuClock.warm: matrix products, which draw the power that attention draws."""
        begin = time.monotonic()
        if begin - self._last < IDLE_SECONDS:
            return
        x = torch.zeros(WARM_SIZE, WARM_SIZE, dtype=torch.float16, device="cuda")
        while time.monotonic() - begin < WARM_SECONDS:
            x @ x
            _cuda.synchronize()
        self._last = time.monotonic()

    def prepare(self, call: TimedCall) -> TimedCall:
        """As CpuClock.prepare; a call that was captured before is not captured again."""
        known = self._captured.get(call)
        if known is not None:
            return known
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
        if self._pool is None:
            self._pool = _cuda.graph_pool_handle()
        with _cuda.graph(captured, pool=self._pool):
            call()
        replay: TimedCall = captured.replay
        self._captured[call] = replay
        return replay

    def sample(self, call: TimedCall, calls: int) -> float:
        """As CpuClock.sample."""
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
                self.buffer.amax(0)
            begin.record()
            for _ in range(calls // pairs):
                call()
            end.record()
        _cuda.synchronize()
        self._last = time.monotonic()
        total_ms: float = sum(begin.elapsed_time(end) for begin, end in events)
        return total_ms / calls * 1e3


MAX_CALLS_PER_SAMPLE = 200  # fewer than the driver queues: the host runs ahead of the GPU
_CONFIDENCE = 0.95
# Events of a GPU whose clock was set back once give a sample of 0 or below; it is taken again.
ATTEMPTS = 3


@dataclass(frozen=True)
class Samples:
    """Microseconds per call of one candidate, one value a round in the order of the rounds.

    A candidate that failed has no values: `us` is empty, `median` and `spread` are NaN, and
    `failure` says why. Each value is the mean of `calls` calls.
    """

    us: tuple[float, ...] = ()
    failure: Failed | None = None
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


NO_RATIO = Ratio(math.nan, math.nan, math.nan, 0)


def paired_ratio(a: Samples, b: Samples) -> Ratio:
    """Time of `a` over time of `b`, round by round: above 1, `b` is the faster.

    Both must come from one call of `time_interleaved`. With fewer than six rounds no order
    statistic reaches 95 %, and the interval is the whole range. A failed side makes the ratio NaN.
    """
    if a.failure or b.failure:
        return NO_RATIO
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
    """The number of n values that may be cut at each end while the rest covers the median at 95
    %.
    """
    tail, cut = 0.0, 0
    while cut < n // 2:
        tail += math.comb(n, cut) / 2**n
        if 2 * tail > 1 - _CONFIDENCE:
            break
        cut += 1
    return max(cut - 1, 0)


@dataclass(frozen=True, slots=True)
class Started:
    """The candidate with this index is about to be prepared or timed."""

    index: int


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A candidate's microseconds per call, in the mean of `calls` calls."""

    index: int
    us: float
    calls: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate is out of the race: it failed, or without a failure it was hopelessly slow."""

    index: int
    failure: Failed | None


Event = Started | RoundTime | Dropped


def race(
    calls: Sequence[TimedCall],
    *,
    rounds: int,
    min_ms: float,
    clock: CpuClock,
    limit_us: float = math.inf,
) -> Iterator[Event]:
    """Time every call once a round, in an order that rotates and reverses; says each step.

    The k-th RoundTime of a candidate is its round k. One whose first estimate is above `limit_us`
    gives the estimate as its only value and leaves. A call that raises leaves too, and one whose
    samples are no times; the others go on. Nothing runs between a step and the request for the
    next one.
    """
    running: dict[int, tuple[TimedCall, int]] = {}
    clock.warm()
    for index in range(len(calls)):
        yield Started(index)
        try:
            timed = clock.prepare(calls[index])
            clock.sample(timed, 1)
            estimate = _sample(clock, timed, WARMUP_CALLS)
        except Exception as error:
            yield Dropped(index, failed(type(error).__name__, str(error), "prepare"))
            continue
        if estimate > limit_us:
            yield RoundTime(index, estimate, WARMUP_CALLS)
            yield Dropped(index, None)
        else:
            count = min(max(math.ceil(min_ms * 1e3 / estimate), 1), MAX_CALLS_PER_SAMPLE)
            running[index] = timed, count
    for order in _orders(len(calls), rounds):
        for index in order:
            if index not in running:
                continue
            yield Started(index)
            timed, count = running[index]
            try:
                us = _sample(clock, timed, count)
            except Exception as error:
                del running[index]
                yield Dropped(index, failed(type(error).__name__, str(error), "run"))
            else:
                yield RoundTime(index, us, count)


def _sample(clock: CpuClock, call: TimedCall, calls: int) -> float:
    """Microseconds of a call, taken again where the clock gives what is no time."""
    given: list[float] = []
    while len(given) < ATTEMPTS:
        given.append(clock.sample(call, calls))
        if is_time(given[-1]):
            return given[-1]
    raise MeasureError(
        f"the clock gave {', '.join(f'{us:g}' for us in given)} us for {calls} calls",
        "a time is a finite number above 0",
        "look at the device's clock (nvidia-smi, dmesg), then measure again",
    )


def time_interleaved(
    candidates: Mapping[str, TimedCall],
    *,
    rounds: int,
    min_ms: float,
    flush_l2: bool,
    graph: bool,
    clock: Literal["cuda", "cpu"] = "cuda",
) -> dict[str, Samples]:
    """The race of named candidates, to its end.

    A value is the mean time of as many calls as fill `min_ms`. `flush_l2` evicts the L2 cache
    before each call, outside the timed region. `graph` captures each candidate in a CUDA graph and
    times its replay: what the kernels cost, without the host. The "cpu" clock knows neither.
    A candidate that raises keeps its Failed and leaves the race; the others go on.
    Raises InputError for a combination that cannot be timed.
    """
    if rounds < 1 or min_ms < 0 or (clock == "cpu" and (flush_l2 or graph)):
        raise InputError(
            f"{rounds=}, {min_ms=}, {flush_l2=}, {graph=}, {clock=}",
            "rounds >= 1, min_ms >= 0, and the cpu clock has neither an L2 flush nor graphs",
        )
    stopwatch: CpuClock = CudaClock(flush_l2, graph) if clock == "cuda" else CpuClock()
    names = list(candidates)
    found = dict.fromkeys(names, Samples())
    calls = list(candidates.values())
    for event in race(calls, rounds=rounds, min_ms=min_ms, clock=stopwatch):
        if isinstance(event, RoundTime):
            us = found[names[event.index]].us
            found[names[event.index]] = Samples((*us, event.us), calls=event.calls)
        elif isinstance(event, Dropped):
            found[names[event.index]] = Samples(failure=event.failure)
    return found


def _orders(count: int, rounds: int) -> Iterator[list[int]]:
    """One order a round: everyone leads equally often, and every pair stands in both orders."""
    indices = list(range(count))
    for r in range(rounds):
        shift = (r // 2) % count if count else 0
        order = indices[shift:] + indices[:shift]
        yield order[::-1] if r % 2 else order
