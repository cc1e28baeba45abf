"""The symbols that feasibility is stated in.

flexattn/kernels/base/estimates.py has the numbers that they stand for, in the order of SYMBOLS.
"""

from __future__ import annotations

from sympy import Symbol, symbols

# A config's numbers; num_splits is 0 where keys are not split. Then truth values: whether the
# loads go by TMA, and whether the order of the tiles has a meaning. Then hints to AMD's compiler,
# 0 where there are none: waves of a SIMD, rows of a matrix instruction.
_CONFIG = (
    BLOCK_M, BLOCK_N, num_warps, num_stages, num_splits, use_tma, known_order,
    waves_per_eu, matrix_rows,
) = symbols(
    "BLOCK_M BLOCK_N num_warps num_stages num_splits use_tma known_order "
    "waves_per_eu matrix_rows"
)  # fmt: skip
# A problem's sizes. *_padded: elements of a head dimension as its tiles hold them, *_tiles: how
# many these are; mask_*: rows and keys of a BlockMask's block, 0 without one, *_cover: the widest
# tiles that stay inside one.
_SIZES = (itemsize, qk_dim, v_dim, qk_padded, v_padded, qk_tiles, v_tiles) = symbols(
    "itemsize qk_dim v_dim qk_padded v_padded qk_tiles v_tiles"
)
BLOCKS = (mask_rows, mask_keys, rows_cover, keys_cover) = symbols(
    "mask_rows mask_keys rows_cover keys_cover"
)
# Truth values of a problem: decodes for the decode template, scalar_products where no matrix
# instruction multiplies the dtype, split_products where each product is six of bfloat16,
# loads_keys where a mod reads a value for every key, loads_tile for every score, adds_ramp where
# a product adds what rises along the keys, dense_layout where tensors lie as TMA needs them.
FACTS = (
    decodes, scalar_products, split_products, loads_keys, loads_tile, adds_ramp, dense_layout,
) = symbols(
    "decodes scalar_products split_products loads_keys loads_tile adds_ramp dense_layout"
)  # fmt: skip
# A device's bytes of shared memory, 32-bit registers of an SM and of a thread, lanes of a warp.
_LIMITS = (shared_limit, sm_registers, thread_registers, warp_size) = symbols(
    "shared_limit sm_registers thread_registers warp_size"
)
ENGINES = (has_tma, has_wgmma, is_hip) = symbols("has_tma has_wgmma is_hip")

SYMBOLS: tuple[Symbol, ...] = (*_CONFIG, *_SIZES, *BLOCKS, *FACTS, *_LIMITS, *ENGINES)
# What a config takes, as the formulas have it; known where its own numbers are sound.
ESTIMATED = (shared_memory, registers) = symbols("shared_memory registers")
