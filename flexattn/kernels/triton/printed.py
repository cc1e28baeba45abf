"""What space/stated says, printed by sympy as Python; `make golden` prints it again."""

# fmt: off
# ruff: noqa

from collections.abc import Sequence
from math import floor

NAMES = tuple("BLOCK_M BLOCK_N num_warps num_stages num_splits use_tma known_order itemsize qk_dim v_dim qk_padded v_padded qk_tiles v_tiles mask_rows mask_keys rows_cover keys_cover decodes scalar_products loads_keys loads_tile adds_ramp dense_layout shared_limit sm_registers thread_registers warp_size has_tma has_wgmma is_hip".split())
SHAPE = (
    ("power of two", "BLOCK_M={BLOCK_M} is not a power of two of at least 16"),
    ("power of two", "BLOCK_N={BLOCK_N} is not a power of two of at least 16"),
    ("warps", "num_warps={num_warps} is not one of 1, 2, 4, 8, 16"),
    ("stages", "num_stages={num_stages} is not between 1 and 8"),
    ("splits", "num_splits={num_splits} is below 0"),
    ("order", "the order of {config} is none of those there are"),
)
FIT = (
    ("dtype", "float8 is multiplied by the Gluon template alone, on Hopper"),
    ("mask block", "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}"),
    ("mask block", "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}"),
    ("tma", "use_tma: {arch} has no TMA"),
    ("tma", "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes"),
    ("tma", "use_tma: head dimension {qk_dim} is not one tile of at most 256"),
    ("tma", "use_tma: head dimension {v_dim} is not one tile of at most 256"),
    ("shared memory", "shared memory: about {shared_memory} bytes, {device} has {shared_limit}"),
    ("registers", "registers: about {registers} a thread, {arch} has {thread_registers}"),
    ("occupancy", "occupancy: about {registers} registers a thread in {num_warps} warps, an SM of {arch} has {sm_registers}"),
)
WORTH = (
    ("headroom", "headroom: about {registers} registers a thread leave few of {thread_registers}"),
    ("idle warps", "idle warps: {num_warps} on {BLOCK_M} rows"),
    ("slower loads", "slower loads: TMA could read the tiles"),
)


def estimates(values: Sequence[int]) -> tuple[float, ...]:
    """Shared memory, registers."""
    BLOCK_M, BLOCK_N, num_warps, num_stages, _, _, _, itemsize, _, _, qk_padded, v_padded, _, _, _, _, _, _, _, scalar_products, loads_keys, loads_tile, adds_ramp, _, _, _, _, warp_size, _, has_wgmma, is_hip, *_ = values
    return (
        ((max(BLOCK_M*itemsize*qk_padded, BLOCK_N*itemsize*(((qk_padded + v_padded)*((num_stages) if has_wgmma and (itemsize == 2) and (BLOCK_M >= 64) and (num_warps >= 4) else (num_stages - 1))) if (num_stages > 1) else (max(qk_padded, v_padded))) + ((32*BLOCK_N) if adds_ramp else (0)) + ((BLOCK_M*BLOCK_N*max(4, itemsize)) if loads_tile else (0) if has_wgmma and (itemsize == 2) and (BLOCK_M >= 64) and (BLOCK_M >= 16*num_warps) and (num_warps >= 4) else (BLOCK_M*BLOCK_N*itemsize)))) if is_hip else (BLOCK_M*itemsize*qk_padded + BLOCK_N*itemsize*(((qk_padded + v_padded)*((num_stages) if has_wgmma and (itemsize == 2) and (BLOCK_M >= 64) and (num_warps >= 4) else (num_stages - 1))) if (num_stages > 1) else (max(qk_padded, v_padded))) + ((32*BLOCK_N) if adds_ramp else (0)) + ((BLOCK_M*BLOCK_N*max(4, itemsize)) if loads_tile else (0) if has_wgmma and (itemsize == 2) and (BLOCK_M >= 64) and (BLOCK_M >= 16*num_warps) and (num_warps >= 4) else (BLOCK_M*BLOCK_N*itemsize)) + 2048)),
        ((floor((3/4)*BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + 3*BLOCK_M*BLOCK_N/(num_warps*warp_size) + 3*BLOCK_M*v_padded/(num_warps*warp_size) + 3*BLOCK_N*qk_padded*((3/2) if (num_stages > 1) else (1))/(num_warps*warp_size)) + 24) if scalar_products else (2*num_stages + ((floor(BLOCK_M*BLOCK_N/(num_warps*warp_size)) + 8) if loads_tile else (8) if loads_keys else (0)) + floor((1/4)*BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + BLOCK_M*BLOCK_N/(num_warps*warp_size) + BLOCK_M*v_padded/(num_warps*warp_size)) + 26) if has_wgmma and (itemsize == 2) and (BLOCK_M >= 64) and (num_warps >= 4) else (((floor(BLOCK_M*BLOCK_N/(num_warps*warp_size)) + 8) if loads_tile else (8) if loads_keys else (0)) + floor((BLOCK_M*BLOCK_N*itemsize*num_stages*(qk_padded + v_padded)/(warp_size*max(BLOCK_M, 16*num_warps)) + BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + 4*BLOCK_M*BLOCK_N/(num_warps*warp_size) + 4*BLOCK_M*v_padded/(num_warps*warp_size) + 2*min(128, (1/2)*itemsize*qk_padded*max(BLOCK_M, 16*num_warps)/(num_warps*warp_size)))/3) + 24) if is_hip and (warp_size == 32) else (floor((3/8)*BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + (3/2)*BLOCK_M*BLOCK_N/(num_warps*warp_size) + (3/8)*BLOCK_M*itemsize*qk_padded/(num_warps*warp_size) + (3/2)*BLOCK_M*v_padded/(num_warps*warp_size) + (3/4)*BLOCK_N*itemsize*qk_padded/(num_warps*warp_size)) + 120) if is_hip else (floor((1/4)*BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + BLOCK_M*BLOCK_N/(num_warps*warp_size) + BLOCK_M*v_padded/(num_warps*warp_size) + (3/8)*BLOCK_N*itemsize*qk_padded/(num_warps*warp_size)) + 100) if (BLOCK_M < 16*num_warps) else (floor((1/4)*BLOCK_M*BLOCK_N*itemsize/(num_warps*warp_size) + BLOCK_M*BLOCK_N/(num_warps*warp_size) + (1/4)*BLOCK_M*itemsize*qk_padded/(num_warps*warp_size) + BLOCK_M*v_padded/(num_warps*warp_size) + (1/8)*BLOCK_N*itemsize) + 40)),
    )


def shape(values: Sequence[int]) -> tuple[int, ...]:
    """Which of SHAPE hold."""
    BLOCK_M, BLOCK_N, num_warps, num_stages, num_splits, _, known_order, *_ = values
    return (
        (65536 % max(1, BLOCK_M) == 0) and (BLOCK_M >= 16),
        (65536 % max(1, BLOCK_N) == 0) and (BLOCK_N >= 16),
        (16 % max(1, num_warps) == 0) and (num_warps >= 1),
        (num_stages >= 1) and (num_stages <= 8),
        (num_splits >= 0),
        known_order,
    )


def fit(values: Sequence[int]) -> tuple[int, ...]:
    """Which of FIT hold."""
    BLOCK_M, BLOCK_N, num_warps, _, _, use_tma, _, itemsize, _, _, qk_padded, v_padded, qk_tiles, v_tiles, mask_rows, mask_keys, rows_cover, keys_cover, _, _, _, _, _, dense_layout, shared_limit, sm_registers, thread_registers, warp_size, has_tma, _, _, shared_memory, registers = values
    return (
        (itemsize >= 2),
        (mask_rows == 0) or (BLOCK_M <= rows_cover),
        (mask_keys == 0) or (BLOCK_N <= keys_cover),
        has_tma or not use_tma,
        dense_layout or not use_tma,
        (qk_tiles == 1) and (qk_padded <= 256) or not use_tma,
        (v_tiles == 1) and (v_padded <= 256) or not use_tma,
        (shared_memory <= shared_limit),
        (registers <= thread_registers),
        (num_warps*registers*warp_size <= sm_registers),
    )


def worth(values: Sequence[int]) -> tuple[int, ...]:
    """Which of WORTH hold."""
    BLOCK_M, _, num_warps, _, _, use_tma, _, _, _, _, qk_padded, v_padded, qk_tiles, v_tiles, _, _, _, _, decodes, _, _, _, _, dense_layout, _, _, thread_registers, warp_size, has_tma, _, is_hip, _, registers = values
    return (
        is_hip and (warp_size == 32) or (4*registers <= 3*thread_registers),
        decodes or (16*num_warps <= BLOCK_M) or (v_padded > 128),
        decodes or use_tma or not (dense_layout and has_tma and (qk_tiles == 1) and (v_tiles == 1) and (qk_padded <= 256) and (v_padded <= 256)),
    )
