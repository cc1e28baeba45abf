"""What of tiles is multiplied and added where heads have fewer columns than tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from flexattn.kernels.hopper_backward.config import (
    HopperBackwardConfig,
    columns,
    multiplied_columns,
)
from flexattn.kernels.ptx.narrow_products import announcement
from flexattn.problem import Structure


@dataclass(frozen=True, slots=True)
class Boxes:
    """What the copy engine adds of a tile of dq, of count equal boxes; used: by each warpgroup."""

    count: int
    used: tuple[tuple[int, ...], tuple[int, ...]]
    narrow: bool


def dq_boxes(structure: Structure, config: HopperBackwardConfig) -> Boxes:
    """One box of all columns, or each warpgroup's; of fewer columns those that a head has.

    A warpgroup has eights of columns one after the other, 64 rows of each.
    """
    tile, used = columns(structure), multiplied_columns(structure.head_dim_qk)
    if used == tile:
        return Boxes(2, ((0,), (1,)), False) if config.dq_halves else Boxes(1, ((0,), ()), False)
    by_rows = config.BLOCK_M == 128
    widest = tile if by_rows else tile // 2
    widths = (used, used) if by_rows else (min(used, widest), max(0, used - widest))
    width = gcd(widest, *widths)
    boxes = [tuple(range(n // width)) for n in widths]
    first = widest // width
    return Boxes(2 * first, (boxes[0], tuple(first + n for n in boxes[1])), True)


def announcements(structure: Structure, config: HopperBackwardConfig) -> dict[str, str]:
    """What products say that multiply fewer columns than tiles have, by their names; "" of others.

    s and dp are sums over columns. Where warpgroups share the columns of a product's result, its
    N is that of both: none of dk, dv and dq there is narrow, but by_product's first half of dq.
    """
    tile, rows, keys = columns(structure), config.BLOCK_M, config.BLOCK_N
    qk, v = map(multiplied_columns, structure.head_dims)
    score_columns = rows // 2 if config.split else rows
    # Of half of V in registers the rest is a product of its own.
    held = 64 if holds_half(structure, config) else 0
    sums = {"s": (qk, tile), "dp": (v - held, tile - held)}
    found = dict.fromkeys(("s", "dp", "dv", "dk", "dq"), "")
    for name, (used, of) in sums.items():
        if used < of:
            found[name] = announcement((used // 16, of // 16), (score_columns, score_columns))
    results = {} if config.split else {"dv": (v, tile, rows), "dk": (qk, tile, rows)}
    if config.by_product:
        results["dq"] = (max(qk - tile // 2, 8), tile // 2, keys)
    elif rows == 128:
        results["dq"] = (qk, tile, keys)
    for name, (used, of, summed) in results.items():
        if used < of:
            found[name] = announcement((summed // 16, summed // 16), (used, of))
    return found


def holds_half(structure: Structure, config: HopperBackwardConfig) -> bool:
    """True if 64 columns of V, of up to 128, are in registers."""
    wide = columns(structure) == 128 and structure.head_dim_v > 64
    return config.dp_rs and config.BLOCK_N == 128 and wide


def halves_of_dq(structure: Structure, config: HopperBackwardConfig) -> dict[str, object]:
    """Which warpgroup of by_product has which half of dq's columns, as the template's constants.

    Of fewer columns than tiles have, who weighs has those of the second half, and fewer sums of a
    thread: it has the exponentials, too.
    """
    tile, qk = columns(structure), multiplied_columns(structure.head_dim_qk)
    swapped = config.by_product and qk < tile
    return {
        "swapped": swapped,
        "weighing_sums": (max(qk - tile // 2, 8) if swapped else tile // 2) // 2,
    }
