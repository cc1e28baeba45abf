"""What a config takes of its device before anything is compiled, as formulas over the terms.

Both are fitted to compiled kernels of every arch.
"""

from __future__ import annotations

from sympy import And, Eq, Max, Min, Or, Piecewise, Rational, floor

from flexattn.kernels.stated import symbols as s
from flexattn.kernels.stated.statement import Steps

# Barriers, scratch of reductions and layout changes, beside the tiles themselves.
_SHARED_SLACK = 2048
# Addresses, loop state, row statistics and what the mods hold, beside the tiles themselves.
WGMMA_SLACK, MMA_SLACK, KEYS_SLACK, MFMA_SLACK, FMA_SLACK = 26, 40, 100, 120, 24
WMMA_SLACK, WMMA_ROWS, SPLIT_SLACK = 24, 128, 24
# Of a key in a product that adds a ramp: 16 bfloat16 numbers.
RAMP_BYTES = 32
# Of a float32 number as three of bfloat16.
SPLIT_BYTES = 6
# What a mod reads for each key of a tile, before it is used.
_GATHER_REGISTERS = 8

# Of AMD's GPUs those whose waves have 32 threads; fitted to gfx1100, the tightest of them.
RDNA = And(s.is_hip, Eq(s.warp_size, 32))

let = Steps()

wgmma = let(
    "wgmma",
    And(s.has_wgmma, Eq(s.itemsize, 2), s.BLOCK_M >= 64, s.num_warps >= 4),
    "A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.",
)

split_wgmma = let(
    "split_wgmma",
    And(s.split_products, s.has_wgmma, s.BLOCK_M >= 64, s.num_warps >= 4),
    "Float32 as three parts of bfloat16, of which those of Q lie in shared memory as well.",
)

# Shared memory.
in_registers = let(
    "in_registers",
    And(Or(wgmma, split_wgmma), s.BLOCK_M >= 16 * s.num_warps),
    "P stays with the warps that made it.",
)
p_tile = let(
    "p_tile",
    Piecewise(
        (s.BLOCK_M * s.BLOCK_N * Max(s.itemsize, 4), s.loads_tile),
        (0, in_registers),
        (SPLIT_BYTES * s.BLOCK_M * s.BLOCK_N, split_wgmma),
        (s.BLOCK_M * s.BLOCK_N * s.itemsize, True),
    ),
)
ahead = let(
    "ahead",
    Piecewise((s.num_stages, wgmma), (s.num_stages - 1, True)),
    "wgmma reads K and V in place, so the tiles in use count too.",
)
held = let(
    "held",
    Piecewise(
        (ahead * (s.qk_padded + s.v_padded), s.num_stages > 1),
        (0, s.split_products),
        (Max(s.qk_padded, s.v_padded), True),
    ),
    "One stage holds either of K and V.",
)
parts = let(
    "parts",
    Piecewise(
        (SPLIT_BYTES * Max(s.qk_padded, s.v_padded), s.split_products),
        (0, True),
    ),
    "What is split lies there a second time, as three parts of bfloat16; without wgmma fragments "
    "of rows and keys do, of which this is enough.",
)
ramp = let("ramp", Piecewise((RAMP_BYTES, s.adds_ramp), (0, True)))
q_bytes = let("q_bytes", Piecewise((SPLIT_BYTES, split_wgmma), (s.itemsize, True)))
q_tile = let("q_tile", s.BLOCK_M * s.qk_padded * q_bytes)
kv_tiles = let("kv_tiles", s.BLOCK_N * (held * s.itemsize + parts + ramp))

SHARED_MEMORY_FORMULA = let.formula(
    "shared_memory",
    "Bytes of shared memory. Q, P on its way to a product, K and V ahead of it; exact but for the "
    "slack where nothing is loaded by a mod.",
    Piecewise(
        (Max(q_tile, kv_tiles + p_tile), s.is_hip),
        (q_tile + kv_tiles + p_tile + _SHARED_SLACK, True),
    ),
)

# Registers of one thread.
threads = let("threads", s.warp_size * s.num_warps)
words = let("words", s.itemsize / 4)
scores = let("scores", s.BLOCK_M * s.BLOCK_N / threads)
made = let(
    "made",
    s.BLOCK_M * s.v_padded / threads + scores + scores * words,
    "Accumulator and scores in fp32, and P.",
)
steps_ahead = let(
    "steps_ahead",
    Piecewise((Rational(3, 2), s.num_stages > 1), (1, True)),
    "Without matrix instructions a thread holds operands of several steps at once.",
)
operands = let("operands", steps_ahead * s.BLOCK_N * s.qk_padded / threads)
fma = floor(3 * (made + operands)) + FMA_SLACK
gathered = let(
    "gathered",
    Piecewise(
        (floor(scores) + _GATHER_REGISTERS, s.loads_tile),
        (_GATHER_REGISTERS, s.loads_keys),
        (0, True),
    ),
    "A value for every score takes as many registers as the scores.",
)
wgmma_registers = floor(made) + WGMMA_SLACK + 2 * s.num_stages + gathered
q = let("q", s.BLOCK_M * s.qk_padded * words / threads)
keys = let("keys", s.BLOCK_N * s.qk_padded * words / threads)
mfma = floor(Rational(3, 2) * (made + q + 2 * keys)) + MFMA_SLACK
rows = let(
    "rows",
    Max(s.BLOCK_M, 16 * s.num_warps),
    "Each half of a wave holds whole operands. Warps beyond the rows share out the keys.",
)
shared_keys = let("shared_keys", s.num_stages * s.BLOCK_N * s.BLOCK_M / rows)
held_keys = let("held_keys", 2 * words * shared_keys * (s.qk_padded + s.v_padded) / s.warp_size)
held_rows = let(
    "held_rows",
    Min(2 * words * rows * s.qk_padded / threads, WMMA_ROWS),
    "Of wide heads the rows are read again from shared memory, a part at a time.",
)
wmma = floor(Rational(2, 3) * (2 * made + held_rows + held_keys)) + WMMA_SLACK + gathered
shared_out = floor(made + Rational(3, 2) * keys) + KEYS_SLACK
mma = floor(made + q + s.BLOCK_N * words / 2) + MMA_SLACK
# A tile's product has sums of its own, and P lies there as three parts.
split_registers = floor(2 * s.BLOCK_M * s.v_padded / threads + 4 * scores) + SPLIT_SLACK

REGISTERS_FORMULA = let.formula(
    "registers",
    "Registers of one thread, roughly. No config passes that spills in a loop, and few others "
    "are refused.",
    Piecewise(
        (fma, s.scalar_products),
        (wgmma_registers, wgmma),
        (split_registers, split_wgmma),
        (wmma, RDNA),
        (mfma, s.is_hip),
        # Warps beyond the rows share out the keys: fragments of K and V, and their addresses.
        (shared_out, s.num_warps * 16 > s.BLOCK_M),
        (mma, True),
    ),
)
