"""Feasibility of the Triton templates: inequalities over a config, a problem and a device."""

from __future__ import annotations

from typing import Any

from sympy import And, Eq, Mod, Ne, Not, Or

from flexattn.kernels.stated import symbols as s
from flexattn.kernels.stated.formulas import (
    RDNA,
    REGISTERS_FORMULA,
    SHARED_MEMORY_FORMULA,
)
from flexattn.kernels.stated.statement import Inequality, Statement


def _tile(size: Any, name: str) -> Inequality:
    divides = Eq(Mod(2**16, size), 0)
    words = f"{name}={{{name}}} is not a power of two of at least 16"
    return Inequality("power of two", And(size >= 16, divides), words)


def _one_tile(tiles: Any, size: Any, name: str) -> Inequality:
    fits = And(Eq(tiles, 1), size <= 256)
    words = f"use_tma: head dimension {{{name}}} is not one tile of at most 256"
    return Inequality("tma", Or(Not(s.use_tma), fits), words)


# More waves than this leave no kernel of ours its registers.
MOST_WAVES = 8
# Rows of a matrix instruction that there are: RDNA's have 16, CDNA's 16 or 32. Compilers drop
# other hints without a word, or multiply tiles without matrix instructions.
_KNOWN_ROWS = Or(
    Eq(s.matrix_rows, 0), Eq(s.matrix_rows, 16), And(Eq(s.matrix_rows, 32), Ne(s.warp_size, 32))
)
_NO_HINTS = And(Eq(s.waves_per_eu, 0), Eq(s.matrix_rows, 0))

# Those of the numbers alone: the others are asked where these hold.
_SHAPE: tuple[Inequality, ...] = (
    Inequality(
        "hints",
        Or(_NO_HINTS, And(s.is_hip, s.waves_per_eu <= MOST_WAVES, _KNOWN_ROWS)),
        "the compiler for {arch} does not know the hints of {config}",
    ),
    _tile(s.BLOCK_M, "BLOCK_M"),
    _tile(s.BLOCK_N, "BLOCK_N"),
    Inequality(
        "warps",
        And(s.num_warps >= 1, Eq(Mod(16, s.num_warps), 0)),
        "num_warps={num_warps} is not one of 1, 2, 4, 8, 16",
    ),
    Inequality(
        "stages",
        And(s.num_stages >= 1, s.num_stages <= 8),
        "num_stages={num_stages} is not between 1 and 8",
    ),
    Inequality("splits", s.num_splits >= 0, "num_splits={num_splits} is below 0"),
    Inequality("order", s.known_order, "the order of {config} is none of those there are"),
)
_SPLIT_WGMMA = And(s.split_products, s.has_wgmma, s.BLOCK_M >= 64, s.num_warps >= 4)
# A tile never spans two blocks of a mask; it may cover one that no tile divides.
_FIT: tuple[Inequality, ...] = (
    Inequality(
        "dtype",
        s.itemsize >= 2,
        "float8 is multiplied by the Gluon template alone, on Hopper",
    ),
    Inequality(
        "mask block",
        Or(Eq(s.mask_rows, 0), s.BLOCK_M <= s.rows_cover),
        "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}",
    ),
    Inequality(
        "mask block",
        Or(Eq(s.mask_keys, 0), s.BLOCK_N <= s.keys_cover),
        "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}",
    ),
    # Of parts of tf32 such took twice the time at D 64, and at D 256 one read beyond its tensors
    # (Triton 3.6).
    Inequality(
        "warps",
        Or(Not(_SPLIT_WGMMA), s.num_warps * 16 <= s.BLOCK_M),
        "num_warps={num_warps} share {BLOCK_M} rows of float32, which warpgroups split by 64",
    ),
    Inequality("tma", Or(Not(s.use_tma), s.has_tma), "use_tma: {arch} has no TMA"),
    Inequality(
        "tma",
        Or(Not(s.use_tma), s.dense_layout),
        "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
    ),
    _one_tile(s.qk_tiles, s.qk_padded, "qk_dim"),
    _one_tile(s.v_tiles, s.v_padded, "v_dim"),
    Inequality(
        "shared memory",
        s.shared_memory <= s.shared_limit,
        "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
    ),
    Inequality(
        "registers",
        s.registers <= s.thread_registers,
        "registers: about {registers} a thread, {arch} has {thread_registers}",
    ),
    # One block must be able to live on an SM.
    Inequality(
        "occupancy",
        s.registers * s.warp_size * s.num_warps <= s.sm_registers,
        "occupancy: about {registers} registers a thread in {num_warps} warps, "
        "an SM of {arch} has {sm_registers}",
    ),
)
_TMA_CAN = And(
    s.has_tma,
    s.dense_layout,
    Eq(s.qk_tiles, 1),
    Eq(s.v_tiles, 1),
    s.qk_padded <= 256,
    s.v_padded <= 256,
)
# What can run, and is offered to an exhaustive search alone.
_WORTH: tuple[Inequality, ...] = (
    # The estimate is of mods as heavy as those measured: heavier ones need room.
    Inequality(
        "headroom",
        # These estimates are steep: what they pass has room for the mods that were measured.
        Or(RDNA, _SPLIT_WGMMA, 4 * s.registers <= 3 * s.thread_registers),
        "headroom: about {registers} registers a thread leave few of {thread_registers}",
    ),
    # Two warps on the same 16 rows pay where the accumulator needs them, and only there.
    Inequality(
        "idle warps",
        Or(s.decodes, s.num_warps * 16 <= s.BLOCK_M, s.v_padded > 128),
        "idle warps: {num_warps} on {BLOCK_M} rows",
    ),
    Inequality(
        "slower loads",
        Or(s.decodes, s.use_tma, Not(_TMA_CAN)),
        "slower loads: TMA could read the tiles",
    ),
)

TRITON_STATEMENT = Statement(
    "the Triton templates for prefill and decode",
    s.SYMBOLS,
    _FIT,
    _SHAPE,
    _WORTH,
    s.ESTIMATED,
    (SHARED_MEMORY_FORMULA, REGISTERS_FORMULA),
)
