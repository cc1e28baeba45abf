"""Intervals: which integers an operation can give, for operands between given ends.

A rule does not know the dtype: mods.analysis.intervals takes a result that may leave it for all of
the dtype.
None: nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable

Range = tuple[int, int]
Interval = Callable[..., Range | None]


def corners(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """Of an operation that is monotone in each operand."""

    def rule(x: Range, y: Range) -> Range:
        values = [op(i, j) for i in x for j in y]
        return min(values), max(values)

    return rule


def absolute(x: Range) -> Range:
    """abs."""
    low = 0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1]))
    return low, max(abs(x[0]), abs(x[1]))


def truncated(x: int, y: int) -> int:
    """A quotient, towards zero."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def dividing(op: Callable[[int, int], int]) -> Callable[[Range, Range], Range | None]:
    """Of a division."""

    def rule(x: Range, y: Range) -> Range | None:
        # A divisor of either sign reaches its extremes at its ends and next to zero.
        ends = {j for j in (y[0], y[1], -1, 1) if j != 0 and y[0] <= j <= y[1]}
        if y[0] <= 0 <= y[1]:  # the machine decides what a division by zero gives
            return None
        values = [op(i, j) for i in x for j in ends]
        return min(values), max(values)

    return rule


def floor_mod(x: Range, y: Range) -> Range | None:
    """The remainder of a floored division."""
    if y[0] > 0 and x[0] >= 0:
        return x if x[1] < y[0] else (0, min(x[1], y[1] - 1))
    if y[0] > 0:
        return 0, y[1] - 1
    return (y[0] + 1, 0) if y[1] < 0 else None


def trunc_mod(x: Range, y: Range) -> Range | None:
    """The remainder of a truncated division."""
    if y[0] <= 0 <= y[1]:
        return None
    most = max(abs(y[0]), abs(y[1])) - 1
    return max(-most, min(x[0], 0)), min(most, max(x[1], 0))


def meet(x: Range, y: Range) -> Range | None:
    """and."""
    positive = [r for r in (x, y) if r[0] >= 0]
    return (0, min(r[1] for r in positive)) if positive else None


def either(x: Range, y: Range) -> Range | None:
    """or."""
    if x[0] < 0 or y[0] < 0:
        return None
    return max(x[0], y[0]), 2 ** max(x[1].bit_length(), y[1].bit_length()) - 1


def differ(x: Range, y: Range) -> Range | None:
    """xor."""
    if x[0] < 0 or y[0] < 0:
        return None
    return 0, 2 ** max(x[1].bit_length(), y[1].bit_length()) - 1


def shifted_left(x: Range, y: Range) -> Range | None:
    """<<."""
    return corners(lambda i, j: i << j)(x, y) if y[0] >= 0 and y[1] < 64 else None


def shifted_right(x: Range, y: Range) -> Range | None:
    """>>."""
    return corners(lambda i, j: i >> j)(x, y) if y[0] >= 0 and y[1] < 64 else None


def sign(x: Range) -> Range:
    """-1, 0 or 1."""
    return (x[0] > 0) - (x[0] < 0), (x[1] > 0) - (x[1] < 0)
