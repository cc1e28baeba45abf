"""When each instruction could start: engines work in order, and wait for what they read.

Every engine has a queue of its own and runs beside the others. An instruction starts when its
engine is free and the memory it touches is: what it reads has been written, what it overwrites has
been read and written. Memory is told apart by bytes of a partition.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class _Memory(Protocol):
    cuts: list[int]
    times: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes first..last-1 of every partition of an allocation."""

    memory: Any
    first: int
    last: int


@dataclass
class Timeline:
    """The clock of each engine, in nanoseconds from the start of the kernel.

    busy: what each engine spent on its instructions. end: when the last one is done.
    """

    free: dict[str, float] = field(default_factory=dict)
    busy: Counter[str] = field(default_factory=Counter)
    end: float = 0.0

    def issue(
        self,
        engines: Iterable[str],
        cost: float,
        latency: float,
        reads: Iterable[Span],
        writes: Iterable[Span],
    ) -> None:
        """An instruction that holds its engines for `cost` and is done `latency` after that."""
        engines = tuple(engines)
        start = max([self.free.get(engine, 0.0) for engine in engines], default=0.0)
        reads, writes = tuple(reads), tuple(writes)
        for span in reads:
            start = max(start, _latest(span, reading=True))
        for span in writes:
            start = max(start, _latest(span, reading=False))
        for engine in engines:
            self.free[engine] = start + cost
        if engines:
            self.busy[engines[0]] += cost  # type: ignore[assignment]
        done = start + cost + latency
        self.end = max(self.end, done)
        for span in reads:
            _mark(span, read=start + cost)
        for span in writes:
            _mark(span, written=done)


def _latest(span: Span, reading: bool) -> float:
    """When the bytes are ready: written for a reader, and read by everyone for a writer."""
    first, last = _parts(span)
    times = span.memory.times[first:last]
    if reading:
        return max((written for written, _ in times), default=0.0)
    return max((max(pair) for pair in times), default=0.0)


def _mark(span: Span, written: float | None = None, read: float | None = None) -> None:
    first, last = _parts(span)
    times = span.memory.times
    for index in range(first, last):
        before_written, before_read = times[index]
        if written is not None:
            times[index] = (written, before_read)
        elif read is not None and read > before_read:
            times[index] = (before_written, read)


def _parts(span: Span) -> tuple[int, int]:
    """The indices of the parts that the bytes are made of; parts are split at their ends."""
    memory: _Memory = span.memory
    if not memory.cuts:
        memory.cuts += [span.first, span.last]
        memory.times.append((0.0, 0.0))
        return 0, 1
    for place in (span.first, span.last):
        index = bisect_left(memory.cuts, place)
        if index < len(memory.cuts) and memory.cuts[index] == place:
            continue
        insort(memory.cuts, place)
        if index == 0:
            memory.times.insert(0, (0.0, 0.0))
        elif index == len(memory.cuts) - 1:
            memory.times.append((0.0, 0.0))
        else:
            memory.times.insert(index, memory.times[index - 1])
    return bisect_left(memory.cuts, span.first), bisect_left(memory.cuts, span.last)
