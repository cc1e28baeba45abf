"""Feasibility, stated once: inequalities over a config, a problem and a device, in words too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sympy import And, Basic, Eq, Max, Mod, Not, Or

from flexattn.kernels.stated.formulas import RDNA
from flexattn.kernels.stated.symbols import (
    BLOCK_M,
    BLOCK_N,
    decodes,
    dense_layout,
    has_tma,
    itemsize,
    keys_cover,
    known_order,
    mask_keys,
    mask_rows,
    num_splits,
    num_stages,
    num_warps,
    qk_padded,
    qk_tiles,
    registers,
    rows_cover,
    shared_limit,
    shared_memory,
    sm_registers,
    thread_registers,
    use_tma,
    v_padded,
    v_tiles,
    warp_size,
)

__all__ = ["FIT", "SHAPE", "WORTH", "Inequality"]


@dataclass(frozen=True)
class Inequality:
    """One condition: a short name that reports count by, what must hold, and what to say.

    says: a format string over the symbols' names, and `device`, `arch` and `config`.
    """

    name: str
    holds: Basic
    says: str


def _tile(size: Any, name: str) -> Inequality:
    divides = Eq(Mod(2**16, Max(size, 1)), 0)
    words = f"{name}={{{name}}} is not a power of two of at least 16"
    return Inequality("power of two", And(size >= 16, divides), words)


def _one_tile(tiles: Any, size: Any, name: str) -> Inequality:
    fits = And(Eq(tiles, 1), size <= 256)
    words = f"use_tma: head dimension {{{name}}} is not one tile of at most 256"
    return Inequality("tma", Or(Not(use_tma), fits), words)


# Those of the numbers alone: the others are asked where these hold.
SHAPE: tuple[Inequality, ...] = (
    _tile(BLOCK_M, "BLOCK_M"),
    _tile(BLOCK_N, "BLOCK_N"),
    Inequality(
        "warps",
        And(num_warps >= 1, Eq(Mod(16, Max(num_warps, 1)), 0)),
        "num_warps={num_warps} is not one of 1, 2, 4, 8, 16",
    ),
    Inequality(
        "stages",
        And(num_stages >= 1, num_stages <= 8),
        "num_stages={num_stages} is not between 1 and 8",
    ),
    Inequality("splits", num_splits >= 0, "num_splits={num_splits} is below 0"),
    Inequality("order", known_order, "the order of {config} is none of those there are"),
)
# A tile never spans two blocks of a mask; it may cover one that no tile divides.
FIT: tuple[Inequality, ...] = (
    Inequality(
        "dtype",
        itemsize >= 2,
        "float8 is multiplied by the Gluon template alone, on Hopper",
    ),
    Inequality(
        "mask block",
        Or(Eq(mask_rows, 0), BLOCK_M <= rows_cover),
        "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}",
    ),
    Inequality(
        "mask block",
        Or(Eq(mask_keys, 0), BLOCK_N <= keys_cover),
        "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}",
    ),
    Inequality("tma", Or(Not(use_tma), has_tma), "use_tma: {arch} has no TMA"),
    Inequality(
        "tma",
        Or(Not(use_tma), dense_layout),
        "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
    ),
    _one_tile(qk_tiles, qk_padded, "qk_dim"),
    _one_tile(v_tiles, v_padded, "v_dim"),
    Inequality(
        "shared memory",
        shared_memory <= shared_limit,
        "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
    ),
    Inequality(
        "registers",
        registers <= thread_registers,
        "registers: about {registers} a thread, {arch} has {thread_registers}",
    ),
    # One block must be able to live on an SM.
    Inequality(
        "occupancy",
        registers * warp_size * num_warps <= sm_registers,
        "occupancy: about {registers} registers a thread in {num_warps} warps, "
        "an SM of {arch} has {sm_registers}",
    ),
)
_TMA_CAN = And(
    has_tma, dense_layout, Eq(qk_tiles, 1), Eq(v_tiles, 1), qk_padded <= 256, v_padded <= 256
)
# What can run, and is offered to an exhaustive search alone.
WORTH: tuple[Inequality, ...] = (
    # The estimate is of mods as heavy as those measured: heavier ones need room.
    Inequality(
        "headroom",
        # RDNA's estimate is steep: what it passes at all has room for the mods that were measured.
        Or(RDNA, 4 * registers <= 3 * thread_registers),
        "headroom: about {registers} registers a thread leave few of {thread_registers}",
    ),
    # Two warps on the same 16 rows pay where the accumulator needs them, and only there.
    Inequality(
        "idle warps",
        Or(decodes, num_warps * 16 <= BLOCK_M, v_padded > 128),
        "idle warps: {num_warps} on {BLOCK_M} rows",
    ),
    Inequality(
        "slower loads",
        Or(decodes, use_tma, Not(_TMA_CAN)),
        "slower loads: TMA could read the tiles",
    ),
)
