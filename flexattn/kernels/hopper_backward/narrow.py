"""What of tiles is multiplied and added where heads have fewer columns than tiles."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from flexattn.kernels.hopper_backward.config import (
    HopperBackwardConfig,
    chunks,
    columns,
    is_lean,
    multiplied_columns,
    value_columns,
)
from flexattn.kernels.ptx.narrow_products import announcement
from flexattn.problem import Structure

# Columns of a narrow tile of dq that a program clears, or converts, at once.
PART = 64


@dataclass(frozen=True, slots=True)
class Boxes:
    """What the copy engine adds of a tile of dq, of count equal boxes in shared memory.

    used: the boxes of each warpgroup, as (place in shared memory, place in memory).
    """

    count: int
    used: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    narrow: bool


_WHOLE = Boxes(1, (((0, 0),), ()), False)


class Sums(NamedTuple):
    """What threads add of a product of dq.

    values: sums of a thread. eights: groups of 8 columns that each calling warpgroup adds.
    first: groups before them in the tile.
    """

    values: int
    eights: tuple[int, ...]
    first: int
    guarded: bool = False


def added_sums(structure: Structure, config: HopperBackwardConfig) -> dict[str, Sums]:
    """What threads add, by the names of the functions, where a tile has more columns than a head.

    In memory a tile has eights of columns one after the other, 64 rows of each.
    """
    tile, used = columns(structure), multiplied_columns(structure.head_dim_qk)
    if config.dq_tma or used == tile:
        return {}
    if chunks(structure, config):
        # Of all, since ptxas moves none that asks for something into the next product.
        return {"add_tile_if": Sums(32, (8,), 0, guarded=True)}
    if is_lean(structure, config):
        return {
            "add_tile": Sums(32, _halves(min(used, 128), 64), 0),
            "add_rest": Sums(16, _halves(max(used - 128, 0), 32), 16),
        }
    values, (one, two) = config.BLOCK_M * tile // 256, _halves(used, tile // 2)
    if config.by_product:
        rest = Sums(values, (two,), one, guarded=True)
        return {"add_tile": Sums(values, (one,), 0), "add_tile_if": rest}
    eights = (used // 8, used // 8) if config.BLOCK_M == 128 else (one, two)
    return {"add_tile": Sums(values, eights, 0)}


def _halves(used: int, half: int) -> tuple[int, int]:
    """Eights of used columns, of which the first warpgroup has up to half."""
    return min(used, half) // 8, max(used - half, 0) // 8


def summed(structure: Structure) -> int:
    """Columns of dq in memory, where tiles have more; else 0."""
    used = multiplied_columns(structure.head_dim_qk)
    return used if used < columns(structure) else 0


def dq_size(structure: Structure) -> str:
    """The size of such a tile, by the names of constants."""
    return "BLOCK_M * SUMS" if summed(structure) else "BLOCK_M * HEAD_DIM"


def cut_sums(structure: Structure) -> dict[str, int]:
    """The constants of a kernel that takes a narrow tile in parts; none where tiles are whole."""
    sums = summed(structure)
    return {"SUMS": sums, "PART": PART, "PARTS": -(-sums // PART)} if sums else {}


def dq_boxes(structure: Structure, config: HopperBackwardConfig) -> Boxes:
    """One box of all columns, or each warpgroup's; of fewer columns those that a head has.

    A warpgroup has eights of columns one after the other, 64 rows of each.
    """
    tile, used = columns(structure), multiplied_columns(structure.head_dim_qk)
    if used == tile:
        return Boxes(2, (((0, 0),), ((1, 1),)), False) if config.dq_halves else _WHOLE
    by_rows = config.BLOCK_M == 128
    widest = tile if by_rows else tile // 2
    widths = (used, used) if by_rows else (min(used, widest), max(0, used - widest))
    width = gcd(widest, *widths)
    one, two = (range(n // width) for n in widths)
    first = widest // width
    boxes = tuple((n, n) for n in one), tuple((first + n, len(one) + n) for n in two)
    return Boxes(2 * first, boxes, True)


def announcements(structure: Structure, config: HopperBackwardConfig) -> dict[str, str]:
    """What products say that multiply fewer columns than tiles have, by their names; "" of others.

    s and dp are sums over columns. Where warpgroups share the columns of a product's result, its
    N is that of both: none of dk, dv and dq there is narrow, but by_product's first half of dq.
    """
    tile, rows, keys = columns(structure), config.BLOCK_M, config.BLOCK_N
    if chunks(structure, config):  # each product of 64 columns whose result has a column a key
        return {"s": announcement((rows // 16, rows // 16), (keys, 128))}
    qk, v = map(multiplied_columns, structure.head_dims)
    score_columns = rows // 2 if config.split else rows
    # Of half of V in registers the rest is a product of its own.
    held = 64 if holds_half(structure, config) else 0
    v_tile = value_columns(structure, config)
    sums = {"s": (qk, tile), "dp": (v - held, v_tile - held)}
    found = dict.fromkeys(("s", "dp", "dv", "dk", "dq"), "")
    for name, (used, of) in sums.items():
        if used < of:
            found[name] = announcement((used // 16, of // 16), (score_columns, score_columns))
    results = {} if config.split else {"dv": (v, v_tile, rows), "dk": (qk, tile, rows)}
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
