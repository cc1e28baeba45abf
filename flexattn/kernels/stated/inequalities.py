"""Feasibility of the Triton templates: inequalities over a config, a problem and a device."""

from __future__ import annotations

from typing import Any

from sympy import And, Eq, Mod, Ne, Not, Or

from flexattn.kernels.stated.formulas import RDNA, REGISTERS, SHARED_MEMORY
from flexattn.kernels.stated.statement import Inequality, Statement
from flexattn.kernels.stated.symbols import (
    BLOCK_M,
    BLOCK_N,
    ESTIMATED,
    SYMBOLS,
    decodes,
    dense_layout,
    has_tma,
    is_hip,
    itemsize,
    keys_cover,
    known_order,
    mask_keys,
    mask_rows,
    matrix_rows,
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
    waves_per_eu,
)

__all__ = ["FIT", "SHAPE", "TRITON", "WORTH"]


def _tile(size: Any, name: str) -> Inequality:
    divides = Eq(Mod(2**16, size), 0)
    words = f"{name}={{{name}}} is not a power of two of at least 16"
    return Inequality("power of two", And(size >= 16, divides), words)


def _one_tile(tiles: Any, size: Any, name: str) -> Inequality:
    fits = And(Eq(tiles, 1), size <= 256)
    words = f"use_tma: head dimension {{{name}}} is not one tile of at most 256"
    return Inequality("tma", Or(Not(use_tma), fits), words)


# More waves than this leave no kernel of ours its registers.
MOST_WAVES = 8
# Rows of a matrix instruction that there are: RDNA's have 16, CDNA's 16 or 32. Compilers drop
# other hints without a word, or multiply tiles without matrix instructions.
_KNOWN_ROWS = Or(
    Eq(matrix_rows, 0), Eq(matrix_rows, 16), And(Eq(matrix_rows, 32), Ne(warp_size, 32))
)
_NO_HINTS = And(Eq(waves_per_eu, 0), Eq(matrix_rows, 0))

# Those of the numbers alone: the others are asked where these hold.
SHAPE: tuple[Inequality, ...] = (
    Inequality(
        "hints",
        Or(_NO_HINTS, And(is_hip, waves_per_eu <= MOST_WAVES, _KNOWN_ROWS)),
        "the compiler for {arch} does not know the hints of {config}",
    ),
    _tile(BLOCK_M, "BLOCK_M"),
    _tile(BLOCK_N, "BLOCK_N"),
    Inequality(
        "warps",
        And(num_warps >= 1, Eq(Mod(16, num_warps), 0)),
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

TRITON = Statement(
    "the Triton templates for prefill and decode",
    SYMBOLS,
    FIT,
    SHAPE,
    WORTH,
    ESTIMATED,
    (SHARED_MEMORY, REGISTERS),
)
