"""Estimate: what a family's model expects of a config, for defaults of sizes nobody measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil, gcd
from typing import Literal, TypeVar

from flexattn.device import PEAKS, Device
from flexattn.problem import Problem
from flexattn.problem.mask_lists import kept

_C = TypeVar("_C")
_Bound = Literal["products", "softmax", "memory", "latency"]

# What a model must expect another config to gain over the one that rules put first: the ratios of
# one record's configs are off by 1.5 to 2.4 % in the median, and by more at other sizes.
ESTIMATE_MARGIN = 1.05
# Of an H200's 50 MiB of L2, what the keys and values of the heads at work may fill.
L2_BYTES = 32 * 2**20
# Rows of a mask's block, of which its class tells how many keys they see at most.
_MASK_ROWS = 128
# An H200's memory, in bytes a microsecond: of a device whose own nobody knows.
_BANDWIDTH = 4.8e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Microseconds of a launch, what most of it waits for, and its waves.

    waves: work tiles over what all SMs hold at a time.
    """

    us: float
    bound: _Bound
    waves: float

    def __str__(self) -> str:
        return f"{self.us:.3g} us expected, bound by {self.bound}, {self.waves:.2g} waves"


def bandwidth(device: Device) -> float:
    """The bandwidth of a device's memory, in bytes a microsecond."""
    peaks = PEAKS.get(device.name)
    return peaks.bandwidth * 1e6 if peaks else _BANDWIDTH


def memory_time(problem: Problem, device: Device) -> float:
    """Microseconds in which a device's memory gives each input once and takes the output.

    Of the keys those that some row may see: of a window's, no more than its rows' windows.
    """
    structure, keys = problem.structure, float(problem.kv_len)
    if structure.sparsity is not None:
        share, imbalance = kept(problem.mask_class)
        keys *= min(1.0, share * imbalance * ceil(problem.q_len / _MASK_ROWS))
    columns = structure.head_dim_qk + structure.head_dim_v
    rows = problem.Hq * problem.q_len + problem.Hkv * keys
    return problem.B * rows * columns * structure.itemsize / bandwidth(device)


def key_tiles(problem: Problem, rows: int, keys: int) -> tuple[float, float]:
    """Tiles of so many keys that a tile of rows visits, in the mean and at most.

    Of a causal mask the last tile of rows, which is not full, visits as many as a full one. An
    edge cuts tiles in two: it adds half the rows, and what a multiple of `keys` lacks. So the mean
    is too high where one tile of rows is all, or a mask's class says that it keeps everything.
    """
    every = ceil(problem.kv_len / keys)
    if problem.structure.sparsity is None:
        return every, every
    share, imbalance = kept(problem.mask_class)
    tiles = ceil(problem.q_len / rows)
    empty = (tiles * rows - problem.q_len) * (imbalance - 1) * max(0.0, 0.5 - 1 / tiles)
    edge = (rows + keys - gcd(rows, keys)) / 2
    mean = max(1.0, problem.kv_len * share / keys) + (empty + edge) / keys
    return mean, max(mean, min(mean * imbalance, every))


def best_first(
    rules: Iterable[_C],
    others: Iterable[_C],
    expected: Callable[[_C], Estimate | None],
    can_run: Callable[[_C], bool] = lambda config: True,
    margin: float = ESTIMATE_MARGIN,
) -> Iterator[_C]:
    """The rules' configs in their order, before them the one that a model expects to be fastest.

    It must gain by a margin over the first of theirs that can run; without an estimate of that one
    nothing changes.
    """
    kept = list(rules)
    first = next(filter(can_run, kept), None)
    known = None if first is None else expected(first)
    if known is not None:
        found = [(other.us, each) for each in others if (other := expected(each)) is not None]
        able = (pair for pair in sorted(found, key=lambda pair: pair[0]) if can_run(pair[1]))
        us, best = next(able, (known.us, None))
        if best is not None and us * margin < known.us:
            yield best
            kept = [each for each in kept if each != best]
    yield from kept
