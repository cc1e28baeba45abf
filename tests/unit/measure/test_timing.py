"""The interleaved timer on the CPU clock: order, failures, ratios."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from flexattn.errors import InputError
from flexattn.measure import timing as clocks
from flexattn.measure.timing import (
    CpuClock,
    CudaClock,
    Dropped,
    RoundTime,
    Samples,
    Started,
    _orders,
    paired_ratio,
    race,
    time_interleaved,
)
from flexattn.records.record import Failed


def cpu(candidates, rounds=4, min_ms=0.0):
    return time_interleaved(
        candidates, rounds=rounds, min_ms=min_ms, flush_l2=False, graph=False, clock="cpu"
    )


def test_slower_candidate_is_slower():
    got = cpu({"slow": lambda: time.sleep(0.004), "fast": lambda: None}, rounds=5)
    assert got["slow"].median > 3_900
    assert len(got["fast"].us) == 5 and got["fast"].failure is None
    assert paired_ratio(got["slow"], got["fast"]).low > 10


def test_a_failure_keeps_its_reason_and_the_others_go_on():
    countdown = iter(range(7))

    def dies_later():
        next(countdown)

    def dies_at_once():
        raise ValueError("no such kernel")

    got = cpu({"a": dies_at_once, "b": dies_later, "c": lambda: None}, rounds=6)
    assert got["a"].failure == Failed("prepare", "ValueError", "no such kernel")
    assert got["b"].failure is not None and got["b"].failure.stage == "run"
    assert got["b"].us == () and math.isnan(got["b"].median) and math.isnan(got["b"].spread)
    assert len(got["c"].us) == 6


def test_min_ms_fills_a_sample_with_calls():
    got = cpu({"x": lambda: time.sleep(0.001)}, rounds=1, min_ms=5)
    assert 1 < got["x"].calls <= 5


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_orders_are_fair(count):
    orders = list(_orders(count, 2 * count))
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(set(Counter(order[0] for order in orders).values())) <= 1
    before = Counter((x, y) for o in orders for i, x in enumerate(o) for y in o[i + 1 :])
    assert all(before[x, y] == before[y, x] for x, y in before)


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"min_ms": -1},
        {"flush_l2": True},
        {"graph": True},
    ],
    ids=str,
)
def test_what_cannot_be_timed_is_refused(options):
    asked = {"rounds": 1, "min_ms": 0, "flush_l2": False, "graph": False} | options
    with pytest.raises(InputError, match="rule:"):
        time_interleaved({}, clock="cpu", **asked)


def test_spread_is_relative_interquartile_range():
    assert Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(2 / 3)
    assert Samples((4.0,)).spread == 0.0


def test_ratio_is_paired_by_round():
    slow = Samples((2.0, 20.0, 200.0))
    fast = Samples((1.0, 10.0, 100.0))
    ratio = paired_ratio(slow, fast)
    assert (ratio.value, ratio.low, ratio.high, ratio.rounds) == (2.0, 2.0, 2.0, 3)


@pytest.mark.parametrize(("rounds", "cut"), [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (100, 39)])
def test_interval_is_the_textbook_one(rounds, cut):
    a = Samples(tuple(float(i + 1) for i in range(rounds)))
    ratio = paired_ratio(a, Samples((1.0,) * rounds))
    assert (ratio.low, ratio.high) == (cut + 1, rounds - cut)


def test_ratio_of_a_failure_is_nan_and_of_unlike_runs_refused():
    failed = Samples(failure=Failed("run", "E", "m"))
    assert math.isnan(paired_ratio(failed, Samples((1.0,))).value)
    with pytest.raises(InputError, match="cannot be paired"):
        paired_ratio(Samples((1.0, 2.0)), Samples((1.0,)))


class FakeCuda:
    """torch.cuda with a log of what was asked of the device, and events 1 ms apart."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.log.append(name)

    def current_stream(self):
        return self

    Stream = current_stream

    @contextmanager
    def stream(self, stream):
        yield

    @contextmanager
    def graph(self, captured, pool):
        self.log.append("capture")
        yield

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def Event(self, enable_timing):
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.log.append("event"), elapsed_time=lambda other: 1.0
        )


def cuda_clock(monkeypatch, graph, flush):
    fake = FakeCuda()
    monkeypatch.setattr(clocks, "_cuda", fake)
    clock = CudaClock(flush_l2=False, graph=graph)
    if flush:
        # It reads: what a flush writes, the timed call would have to bring to memory.
        clock.buffer = SimpleNamespace(amax=lambda dim: fake.log.append("flush"))
    return fake.log, clock


def test_cuda_flush_lies_outside_the_timed_region(monkeypatch):
    log, clock = cuda_clock(monkeypatch, graph=False, flush=True)
    assert clock.sample(lambda: log.append("call"), 2) == pytest.approx(1000)
    assert log == [
        "synchronize",
        "_sleep",
        *["flush", "event", "call", "event"] * 2,
        "synchronize",
    ]


def test_cuda_without_flush_times_all_calls_at_once(monkeypatch):
    log, clock = cuda_clock(monkeypatch, graph=False, flush=False)
    assert clock.sample(lambda: log.append("call"), 4) == pytest.approx(250)
    assert log == ["synchronize", "_sleep", "event", *["call"] * 4, "event", "synchronize"]


def test_cuda_graph_is_captured_after_a_warm_up_and_replayed(monkeypatch):
    log, clock = cuda_clock(monkeypatch, graph=True, flush=False)
    call = clock.prepare(lambda: log.append("call"))
    assert log.index("capture") > 2 and log[-2:] == ["capture", "call"]
    log.clear()
    call()
    assert log == ["replay"]


def test_a_call_is_captured_once(monkeypatch):
    log, clock = cuda_clock(monkeypatch, graph=True, flush=False)

    def call():
        log.append("call")

    first = clock.prepare(call)
    assert clock.prepare(call) is first and log.count("capture") == 1
    assert log.count("graph_pool_handle") == 1


def test_the_hopeless_leave_a_race_with_one_value():
    calls = [lambda: None, lambda: time.sleep(0.003), lambda: None]
    steps = list(race(calls, rounds=4, min_ms=0, clock=CpuClock(), limit_us=2_000))
    took = [step.index for step in steps if isinstance(step, RoundTime)]
    assert took.count(0) == took.count(2) == 4 and took.count(1) == 1
    assert [step for step in steps if isinstance(step, Dropped)] == [Dropped(1, None)]


class Faulty(CpuClock):
    """Gives what it is told instead of a time, at the samples of one call from the third on."""

    def __init__(self, call, values):
        self.call, self.values, self.taken = call, iter(values), 0

    def sample(self, call, calls):
        us = super().sample(call, calls)
        self.taken += call is self.call
        return next(self.values, us) if call is self.call and self.taken > 2 else us


@pytest.mark.parametrize("us", [0.0, -3.5, math.nan, math.inf])
def test_a_sample_that_is_no_time_is_taken_again_and_then_fails_its_call(us):
    """A sample of 0 went on to the tuner, whose ratios ended the campaign."""

    def bad():
        pass

    def good():
        pass

    (*_, left) = [
        step
        for step in race([bad, good], rounds=4, min_ms=0, clock=Faulty(bad, [us] * 99))
        if isinstance(step, Dropped)
    ]
    assert left.index == 0 and (left.failure.stage, left.failure.error) == ("run", "MeasureError")
    assert f"the clock gave {us:g}, {us:g}, {us:g} us" in left.failure.message
    steps = list(race([bad, good], rounds=4, min_ms=0, clock=Faulty(bad, [us, us])))
    took = [step for step in steps if isinstance(step, RoundTime)]
    assert [step.index for step in took].count(0) == 4 and all(step.us > 0 for step in took)


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan])
def test_a_warm_up_that_is_no_time_fails_its_call(us):
    """No number ended the race of all: its ceiling was taken outside of what is caught."""
    got = list(race([len, print], rounds=1, min_ms=1, clock=SimpleNamespace(
        warm=lambda: None, prepare=lambda call: call,
        sample=lambda call, calls: us if call is len else 5.0,
    )))  # fmt: skip
    (left,) = [step for step in got if isinstance(step, Dropped)]
    assert left.index == 0 and left.failure.stage == "prepare"
    assert [(step.index, step.us) for step in got if isinstance(step, RoundTime)] == [(1, 5.0)]


def test_a_race_says_who_runs_before_it_runs():
    said = []
    for step in race([lambda: said.append("run")], rounds=2, min_ms=0, clock=CpuClock()):
        said.append(type(step))
    assert said[0] is Started and said[-3:] == [Started, "run", RoundTime]
