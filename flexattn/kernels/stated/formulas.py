"""What a config takes of its device before anything is compiled, as formulas over the terms.

Both are fitted to compiled kernels of every arch.
"""

from __future__ import annotations

from sympy import And, Eq, Max, Min, Piecewise, Rational, floor

from flexattn.kernels.stated.statement import Steps
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

__all__ = ["RDNA", "REGISTERS", "SHARED_MEMORY"]

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

let = Steps()

wgmma = let(
    "wgmma",
    And(has_wgmma, Eq(itemsize, 2), BLOCK_M >= 64, num_warps >= 4),
    "A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.",
)

# Shared memory.
in_registers = let(
    "in_registers", And(wgmma, BLOCK_M >= 16 * num_warps), "P stays with the warps that made it."
)
p_tile = let(
    "p_tile",
    Piecewise(
        (BLOCK_M * BLOCK_N * Max(itemsize, 4), loads_tile),
        (0, in_registers),
        (BLOCK_M * BLOCK_N * itemsize, True),
    ),
)
ahead = let(
    "ahead",
    Piecewise((num_stages, wgmma), (num_stages - 1, True)),
    "wgmma reads K and V in place, so the tiles in use count too.",
)
held = let(
    "held",
    Piecewise((ahead * (qk_padded + v_padded), num_stages > 1), (Max(qk_padded, v_padded), True)),
    "One stage holds either of K and V.",
)
ramp = let("ramp", Piecewise((RAMP_BYTES, adds_ramp), (0, True)))
q_tile = let("q_tile", BLOCK_M * qk_padded * itemsize)
kv_tiles = let("kv_tiles", BLOCK_N * (held * itemsize + ramp))

SHARED_MEMORY = let.formula(
    "shared_memory",
    "Bytes of shared memory. Q, P on its way to a product, K and V ahead of it; exact but for the "
    "slack where nothing is loaded by a mod.",
    Piecewise(
        (Max(q_tile, kv_tiles + p_tile), is_hip), (q_tile + kv_tiles + p_tile + SHARED_SLACK, True)
    ),
)

# Registers of one thread.
threads = let("threads", warp_size * num_warps)
words = let("words", itemsize / 4)
scores = let("scores", BLOCK_M * BLOCK_N / threads)
made = let(
    "made",
    BLOCK_M * v_padded / threads + scores + scores * words,
    "Accumulator and scores in fp32, and P.",
)
steps_ahead = let(
    "steps_ahead",
    Piecewise((Rational(3, 2), num_stages > 1), (1, True)),
    "Without matrix instructions a thread holds operands of several steps at once.",
)
operands = let("operands", steps_ahead * BLOCK_N * qk_padded / threads)
fma = floor(3 * (made + operands)) + FMA_SLACK
gathered = let(
    "gathered",
    Piecewise(
        (floor(scores) + GATHER_REGISTERS, loads_tile), (GATHER_REGISTERS, loads_keys), (0, True)
    ),
    "A value for every score takes as many registers as the scores.",
)
wgmma_registers = floor(made) + WGMMA_SLACK + 2 * num_stages + gathered
q = let("q", BLOCK_M * qk_padded * words / threads)
keys = let("keys", BLOCK_N * qk_padded * words / threads)
mfma = floor(Rational(3, 2) * (made + q + 2 * keys)) + MFMA_SLACK
rows = let(
    "rows",
    Max(BLOCK_M, 16 * num_warps),
    "Each half of a wave holds whole operands. Warps beyond the rows share out the keys.",
)
shared_keys = let("shared_keys", num_stages * BLOCK_N * BLOCK_M / rows)
held_keys = let("held_keys", 2 * words * shared_keys * (qk_padded + v_padded) / warp_size)
held_rows = let(
    "held_rows",
    Min(2 * words * rows * qk_padded / threads, WMMA_ROWS),
    "Of wide heads the rows are read again from shared memory, a part at a time.",
)
wmma = floor(Rational(2, 3) * (2 * made + held_rows + held_keys)) + WMMA_SLACK + gathered
shared_out = floor(made + Rational(3, 2) * keys) + KEYS_SLACK
mma = floor(made + q + BLOCK_N * words / 2) + MMA_SLACK

REGISTERS = let.formula(
    "registers",
    "Registers of one thread, roughly. No config passes that spills in a loop, and few others "
    "are refused.",
    Piecewise(
        (fma, scalar_products),
        (wgmma_registers, wgmma),
        (wmma, RDNA),
        (mfma, is_hip),
        # Warps beyond the rows share out the keys: fragments of K and V, and their addresses.
        (shared_out, num_warps * 16 > BLOCK_M),
        (mma, True),
    ),
)
