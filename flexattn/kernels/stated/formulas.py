"""What a config takes of its device before anything is compiled, as formulas over the terms.

Both are fitted to compiled kernels of every arch.
"""

from __future__ import annotations

from sympy import And, Eq, Expr, Max, Min, Piecewise, Rational, floor

from flexattn.kernels.stated.symbols import (
    BLOCK_M,
    BLOCK_N,
    adds_ramp,
    has_wgmma,
    is_hip,
    itemsize,
    loads_keys,
    loads_tile,
    num_stages,
    num_warps,
    qk_padded,
    scalar_products,
    v_padded,
    warp_size,
)

__all__ = ["RDNA", "REGISTERS", "SHARED_MEMORY", "WGMMA"]

# Barriers, scratch of reductions and layout changes, beside the tiles themselves.
SHARED_SLACK = 2048
# Addresses, loop state, row statistics and what the mods hold, beside the tiles themselves.
WGMMA_SLACK, MMA_SLACK, KEYS_SLACK, MFMA_SLACK, FMA_SLACK = 26, 40, 100, 120, 24
WMMA_SLACK, WMMA_ROWS = 24, 128
# Of a key in a product that adds a ramp: 16 bfloat16 numbers.
RAMP_BYTES = 32
# What a mod reads for each key of a tile, before it is used.
GATHER_REGISTERS = 8

# Of AMD's GPUs those whose waves have 32 threads; fitted to gfx1100, the tightest of them.
RDNA = And(is_hip, Eq(warp_size, 32))
# A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.
WGMMA = And(has_wgmma, Eq(itemsize, 2), BLOCK_M >= 64, num_warps >= 4)


def _shared_memory() -> Expr:
    """Bytes: Q, P on its way to a product, K and V ahead of it; one stage holds either of these.

    Exact but for the slack where nothing is loaded by a mod. wgmma reads K and V in place, so the
    tiles in use count too.
    """
    scores = BLOCK_M * BLOCK_N
    in_registers = And(WGMMA, BLOCK_M >= 16 * num_warps)  # of the warps that made P
    p_tile = Piecewise(
        (scores * Max(itemsize, 4), loads_tile), (0, in_registers), (scores * itemsize, True)
    )
    ahead = Piecewise((num_stages, WGMMA), (num_stages - 1, True))
    held = Piecewise(
        (ahead * (qk_padded + v_padded), num_stages > 1), (Max(qk_padded, v_padded), True)
    )
    q_tile, tiles = BLOCK_M * qk_padded * itemsize, BLOCK_N * held * itemsize
    tiles += Piecewise((RAMP_BYTES * BLOCK_N, adds_ramp), (0, True))
    return Piecewise(
        (Max(q_tile, tiles + p_tile), is_hip), (q_tile + tiles + p_tile + SHARED_SLACK, True)
    )


def _registers() -> Expr:
    """Of one thread, roughly: accumulator and scores in fp32, P, and operands.

    It passes no config that spills in a loop, and refuses few others.
    """
    threads, words = warp_size * num_warps, itemsize / 4
    scores = BLOCK_M * BLOCK_N / threads
    made = BLOCK_M * v_padded / threads + scores + scores * words
    # Without matrix instructions a thread holds operands of several steps at once.
    ahead = Piecewise((Rational(3, 2), num_stages > 1), (1, True))
    fma = floor(3 * (made + ahead * BLOCK_N * qk_padded / threads)) + FMA_SLACK
    # A value for every score takes as many registers as the scores.
    gathered = Piecewise(
        (floor(scores) + GATHER_REGISTERS, loads_tile), (GATHER_REGISTERS, loads_keys), (0, True)
    )
    wgmma = floor(made) + WGMMA_SLACK + 2 * num_stages + gathered
    q, keys = (tile * qk_padded * words / threads for tile in (BLOCK_M, BLOCK_N))
    mfma = floor(Rational(3, 2) * (made + q + 2 * keys)) + MFMA_SLACK
    # Each half of a wave holds whole operands. Warps beyond the rows share out the keys, not rows.
    rows = Max(BLOCK_M, 16 * num_warps)
    shared_keys = num_stages * BLOCK_N * BLOCK_M / rows
    held_keys = 2 * words * shared_keys * (qk_padded + v_padded) / warp_size
    # Of wide heads the rows are read again from shared memory, a part at a time.
    operands = Min(2 * words * rows * qk_padded / threads, WMMA_ROWS) + held_keys
    wmma = floor(Rational(2, 3) * (2 * made + operands)) + WMMA_SLACK + gathered
    # Warps beyond the rows share out the keys: fragments of K and V, and their addresses.
    shared_out = floor(made + Rational(3, 2) * keys) + KEYS_SLACK
    mma = floor(made + q + BLOCK_N * words / 2) + MMA_SLACK
    return Piecewise(
        (fma, scalar_products),
        (wgmma, WGMMA),
        (wmma, RDNA),
        (mfma, is_hip),
        (shared_out, num_warps * 16 > BLOCK_M),
        (mma, True),
    )


SHARED_MEMORY = _shared_memory()
REGISTERS = _registers()
