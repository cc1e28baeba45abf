"""Feasibility of paged decode where all warps of a program share a tile.

Printed of stated/serving.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
    """The numbers of one case."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int
    least: int
    awaits: bool
    known_combine: bool
    v_padded: int
    shared_memory: int
    shared_limit: int
    max_registers: int
    # Known where the rules of the shape hold.
    accumulators: int = 0


def accumulators(c: RuleCase) -> int:
    """Numbers of a tile that registers add up."""
    return c.BLOCK_M * (c.BLOCK_N + c.v_padded)


def estimate(c: RuleCase) -> None:
    """Write into a case what its config takes."""
    c.accumulators = accumulators(c)


RULES: Rules[RuleCase] = Rules(
    shape=(),
    fit=(
        Rule(
            "combine",
            "parts are awaited where tiles are split by heads or round",
            lambda c: not c.awaits,
        ),
        Rule(
            "combine",
            "combine={combine!r} is one of last, launch, dependent, await",
            lambda c: c.known_combine,
        ),
        Rule(
            "power of two",
            "BLOCK_M={BLOCK_M} is no power of two of at least 16",
            lambda c: c.BLOCK_M >= 16 and 65536 % c.BLOCK_M == 0,
        ),
        Rule(
            "power of two",
            "BLOCK_N={BLOCK_N} is no power of two of at least 16",
            lambda c: c.BLOCK_N >= 16 and 65536 % c.BLOCK_N == 0,
        ),
        Rule(
            "warps",
            "num_warps is 1, 2, 4 or 8, and num_stages at least 1",
            lambda c: c.num_stages >= 1 and (c.num_warps in (1, 2, 4, 8)),
        ),
        Rule(
            "programs", "per_sm and least are at least 1", lambda c: c.least >= 1 and c.per_sm >= 1
        ),
        Rule(
            "shared memory",
            "tiles need about {shared_memory} of {shared_limit} bytes of shared memory",
            lambda c: c.shared_memory <= c.shared_limit,
        ),
        Rule(
            "registers",
            "{accumulators} accumulators do not fit {num_warps} warps' registers",
            lambda c: c.accumulators <= 32 * c.num_warps * (c.max_registers - 55),
        ),
    ),
    worth=(),
)
