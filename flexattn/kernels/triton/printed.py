"""Feasibility of the Triton templates for prefill and decode.

Printed of stated/inequalities.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class Case:
    """The numbers of one case."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    num_splits: int
    use_tma: bool
    known_order: bool
    waves_per_eu: int
    matrix_rows: int
    itemsize: int
    qk_dim: int
    v_dim: int
    qk_padded: int
    v_padded: int
    qk_tiles: int
    v_tiles: int
    mask_rows: int
    mask_keys: int
    rows_cover: int
    keys_cover: int
    decodes: bool
    scalar_products: bool
    loads_keys: bool
    loads_tile: bool
    adds_ramp: bool
    dense_layout: bool
    shared_limit: int
    sm_registers: int
    thread_registers: int
    warp_size: int
    has_tma: bool
    has_wgmma: bool
    is_hip: bool
    # Known where the rules of the shape hold.
    shared_memory: int = 0
    registers: int = 0


def shared_memory(case: Case) -> int:
    """Bytes of shared memory.

    Q, P on its way to a product, K and V ahead of it; exact but for the slack where nothing is
    loaded by a mod.
    """
    # A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.
    wgmma = case.has_wgmma and case.itemsize == 2 and case.BLOCK_M >= 64 and case.num_warps >= 4
    # P stays with the warps that made it.
    in_registers = wgmma and case.BLOCK_M >= 16 * case.num_warps
    if case.loads_tile:
        p_tile = case.BLOCK_M * case.BLOCK_N * max(case.itemsize, 4)
    elif in_registers:
        p_tile = 0
    else:
        p_tile = case.BLOCK_M * case.BLOCK_N * case.itemsize
    # wgmma reads K and V in place, so the tiles in use count too.
    ahead = case.num_stages if wgmma else case.num_stages - 1
    # One stage holds either of K and V.
    if case.num_stages > 1:
        held = ahead * (case.qk_padded + case.v_padded)
    else:
        held = max(case.qk_padded, case.v_padded)
    ramp = 32 if case.adds_ramp else 0
    q_tile = case.BLOCK_M * case.itemsize * case.qk_padded
    kv_tiles = case.BLOCK_N * (held * case.itemsize + ramp)
    if case.is_hip:
        return max(q_tile, kv_tiles + p_tile)
    return kv_tiles + p_tile + q_tile + 2048


def registers(case: Case) -> int:
    """Registers of one thread, roughly.

    No config passes that spills in a loop, and few others are refused.
    """
    threads = case.num_warps * case.warp_size
    words = case.itemsize / 4
    scores = case.BLOCK_M * case.BLOCK_N / threads
    # Accumulator and scores in fp32, and P.
    made = case.BLOCK_M * case.v_padded / threads + scores * words + scores
    if case.scalar_products:
        # Without matrix instructions a thread holds operands of several steps at once.
        steps_ahead = 3 / 2 if case.num_stages > 1 else 1
        operands = case.BLOCK_N * case.qk_padded * steps_ahead / threads
        return floor(3 * made + 3 * operands) + 24
    # A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.
    wgmma = case.has_wgmma and case.itemsize == 2 and case.BLOCK_M >= 64 and case.num_warps >= 4
    # A value for every score takes as many registers as the scores.
    if case.loads_tile:
        gathered = floor(scores) + 8
    elif case.loads_keys:
        gathered = 8
    else:
        gathered = 0
    if wgmma:
        return gathered + 2 * case.num_stages + floor(made) + 26
    if case.is_hip and case.warp_size == 32:
        # Each half of a wave holds whole operands. Warps beyond the rows share out the keys.
        rows = max(case.BLOCK_M, 16 * case.num_warps)
        shared_keys = case.BLOCK_M * case.BLOCK_N * case.num_stages / rows
        held_keys = 2 * shared_keys * words * (case.qk_padded + case.v_padded) / case.warp_size
        # Of wide heads the rows are read again from shared memory, a part at a time.
        held_rows = min(2 * case.qk_padded * rows * words / threads, 128)
        return gathered + floor((2 * held_keys + 2 * held_rows + 4 * made) / 3) + 24
    q = case.BLOCK_M * case.qk_padded * words / threads
    keys = case.BLOCK_N * case.qk_padded * words / threads
    if case.is_hip:
        return floor(3 * keys + 3 * made / 2 + 3 * q / 2) + 120
    if case.BLOCK_M < 16 * case.num_warps:
        return floor(3 * keys / 2 + made) + 100
    return floor(case.BLOCK_N * words / 2 + made + q) + 40


def estimate(case: Case) -> None:
    """Write into a case what its config takes."""
    case.shared_memory = shared_memory(case)
    case.registers = registers(case)


RULES: Rules[Case] = Rules(
    shape=(
        Rule(
            "hints",
            "the compiler for {arch} does not know the hints of {config}",
            lambda case: (
                (case.matrix_rows == 0 and case.waves_per_eu == 0)
                or (
                    case.is_hip
                    and case.waves_per_eu <= 8
                    and (
                        case.matrix_rows == 0
                        or case.matrix_rows == 16
                        or (case.matrix_rows == 32 and case.warp_size != 32)
                    )
                )
            ),
        ),
        Rule(
            "power of two",
            "BLOCK_M={BLOCK_M} is not a power of two of at least 16",
            lambda case: case.BLOCK_M >= 16 and 65536 % case.BLOCK_M == 0,
        ),
        Rule(
            "power of two",
            "BLOCK_N={BLOCK_N} is not a power of two of at least 16",
            lambda case: case.BLOCK_N >= 16 and 65536 % case.BLOCK_N == 0,
        ),
        Rule(
            "warps",
            "num_warps={num_warps} is not one of 1, 2, 4, 8, 16",
            lambda case: case.num_warps >= 1 and 16 % case.num_warps == 0,
        ),
        Rule(
            "stages",
            "num_stages={num_stages} is not between 1 and 8",
            lambda case: case.num_stages >= 1 and case.num_stages <= 8,
        ),
        Rule(
            "splits",
            "num_splits={num_splits} is below 0",
            lambda case: case.num_splits >= 0,
        ),
        Rule(
            "order",
            "the order of {config} is none of those there are",
            lambda case: case.known_order,
        ),
    ),
    fit=(
        Rule(
            "dtype",
            "float8 is multiplied by the Gluon template alone, on Hopper",
            lambda case: case.itemsize >= 2,
        ),
        Rule(
            "mask block",
            "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}",
            lambda case: case.mask_rows == 0 or case.BLOCK_M <= case.rows_cover,
        ),
        Rule(
            "mask block",
            "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}",
            lambda case: case.mask_keys == 0 or case.BLOCK_N <= case.keys_cover,
        ),
        Rule(
            "tma",
            "use_tma: {arch} has no TMA",
            lambda case: case.has_tma or not case.use_tma,
        ),
        Rule(
            "tma",
            "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda case: case.dense_layout or not case.use_tma,
        ),
        Rule(
            "tma",
            "use_tma: head dimension {qk_dim} is not one tile of at most 256",
            lambda case: not case.use_tma or (case.qk_tiles == 1 and case.qk_padded <= 256),
        ),
        Rule(
            "tma",
            "use_tma: head dimension {v_dim} is not one tile of at most 256",
            lambda case: not case.use_tma or (case.v_tiles == 1 and case.v_padded <= 256),
        ),
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
            lambda case: case.shared_memory <= case.shared_limit,
        ),
        Rule(
            "registers",
            "registers: about {registers} a thread, {arch} has {thread_registers}",
            lambda case: case.registers <= case.thread_registers,
        ),
        Rule(
            "occupancy",
            "occupancy: about {registers} registers a thread in {num_warps} warps, an SM of "
            "{arch} has {sm_registers}",
            lambda case: case.num_warps * case.registers * case.warp_size <= case.sm_registers,
        ),
    ),
    worth=(
        Rule(
            "headroom",
            "headroom: about {registers} registers a thread leave few of {thread_registers}",
            lambda case: (
                (case.is_hip and case.warp_size == 32)
                or 4 * case.registers <= 3 * case.thread_registers
            ),
        ),
        Rule(
            "idle warps",
            "idle warps: {num_warps} on {BLOCK_M} rows",
            lambda case: (
                case.decodes or case.v_padded > 128 or 16 * case.num_warps <= case.BLOCK_M
            ),
        ),
        Rule(
            "slower loads",
            "slower loads: TMA could read the tiles",
            lambda case: (
                case.decodes
                or case.use_tma
                or not (
                    case.dense_layout
                    and case.has_tma
                    and case.qk_tiles == 1
                    and case.v_tiles == 1
                    and case.qk_padded <= 256
                    and case.v_padded <= 256
                )
            ),
        ),
    ),
)
