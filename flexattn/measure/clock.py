"""Clock: what a call costs, on the GPU's own events or on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

TimedCall = Callable[[], object]
_cuda: Any = torch.cuda  # its streams, events and graphs carry no types

WARMUP_CALLS = 3
MIN_FLUSH_BYTES = 128 << 20
LEAD_CYCLES = 400_000  # about 200 us of a GPU's clock
# An idle GPU lowers its clocks and takes tens of milliseconds of work to raise them again.
WARM_SECONDS = 0.1
IDLE_SECONDS = 0.5
WARM_SIZE = 4096


class Clock(Protocol):
    """Warms the device and calls up, then times calls."""

    def warm(self) -> None:
        """Work until the device runs at its full clocks, unless it just did."""

    def prepare(self, call: TimedCall) -> TimedCall:
        """Warm `call` up and return what is to be timed."""

    def sample(self, call: TimedCall, calls: int) -> float:
        """Mean microseconds of `calls` calls."""


class CpuClock:
    """The host's clock."""

    def warm(self) -> None:
        """As Clock.warm: the host needs none."""

    def prepare(self, call: TimedCall) -> TimedCall:
        """As Clock.prepare."""
        call()
        return call

    def sample(self, call: TimedCall, calls: int) -> float:
        """As Clock.sample."""
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls / 1e3


class CudaClock:
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
        """As Clock.warm: matrix products, which draw the power that attention draws."""
        begin = time.monotonic()
        if begin - self._last < IDLE_SECONDS:
            return
        x = torch.zeros(WARM_SIZE, WARM_SIZE, dtype=torch.float16, device="cuda")
        while time.monotonic() - begin < WARM_SECONDS:
            x @ x
            _cuda.synchronize()
        self._last = time.monotonic()

    def prepare(self, call: TimedCall) -> TimedCall:
        """As Clock.prepare; a call that was captured before is not captured again."""
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
        """As Clock.sample."""
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
