"""Feasibility of the Triton templates for prefill and decode.

Printed of stated/inequalities.py, which says what the numbers mean, by `make golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from flexattn.kernels.base.rule import Rule, Rules


@dataclass(slots=True, eq=False, repr=False)
class RuleCase:
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
    split_products: bool
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


def shared_memory(c: RuleCase) -> int:
    """Bytes of shared memory.

    Q, P on its way to a product, K and V ahead of it; exact but for the slack where nothing is
    loaded by a mod.
    """
    # A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.
    wgmma = c.has_wgmma and c.itemsize == 2 and c.BLOCK_M >= 64 and c.num_warps >= 4
    # Float32 as three parts of bfloat16, of which those of Q lie in shared memory as well.
    split_wgmma = c.has_wgmma and c.split_products and c.BLOCK_M >= 64 and c.num_warps >= 4
    # P stays with the warps that made it.
    in_registers = (split_wgmma or wgmma) and c.BLOCK_M >= 16 * c.num_warps
    if c.loads_tile:
        p_tile = c.BLOCK_M * c.BLOCK_N * max(c.itemsize, 4)
    elif in_registers:
        p_tile = 0
    elif split_wgmma:
        p_tile = 6 * c.BLOCK_M * c.BLOCK_N
    else:
        p_tile = c.BLOCK_M * c.BLOCK_N * c.itemsize
    # wgmma reads K and V in place, so the tiles in use count too.
    ahead = c.num_stages if wgmma else c.num_stages - 1
    # One stage holds either of K and V.
    if c.num_stages > 1:
        held = ahead * (c.qk_padded + c.v_padded)
    elif c.split_products:
        held = 0
    else:
        held = max(c.qk_padded, c.v_padded)
    # What is split lies there a second time, as three parts of bfloat16; without wgmma fragments
    # of rows and keys do, of which this is enough.
    parts = 6 * max(c.qk_padded, c.v_padded) if c.split_products else 0
    ramp = 32 if c.adds_ramp else 0
    q_bytes = 6 if split_wgmma else c.itemsize
    q_tile = c.BLOCK_M * q_bytes * c.qk_padded
    kv_tiles = c.BLOCK_N * (held * c.itemsize + parts + ramp)
    if c.is_hip:
        return max(q_tile, kv_tiles + p_tile)
    return kv_tiles + p_tile + q_tile + 2048


def registers(c: RuleCase) -> int:
    """Registers of one thread, roughly.

    No config passes that spills in a loop, and few others are refused.
    """
    threads = c.num_warps * c.warp_size
    words = c.itemsize / 4
    scores = c.BLOCK_M * c.BLOCK_N / threads
    # Accumulator and scores in fp32, and P.
    made = c.BLOCK_M * c.v_padded / threads + scores * words + scores
    if c.scalar_products:
        # Without matrix instructions a thread holds operands of several steps at once.
        steps_ahead = 3 / 2 if c.num_stages > 1 else 1
        operands = c.BLOCK_N * c.qk_padded * steps_ahead / threads
        return floor(3 * made + 3 * operands) + 24
    # A warpgroup multiplies 64 rows, with the accumulator in registers and K in shared memory.
    wgmma = c.has_wgmma and c.itemsize == 2 and c.BLOCK_M >= 64 and c.num_warps >= 4
    # A value for every score takes as many registers as the scores.
    if c.loads_tile:
        gathered = floor(scores) + 8
    elif c.loads_keys:
        gathered = 8
    else:
        gathered = 0
    if wgmma:
        return gathered + 2 * c.num_stages + floor(made) + 26
    # Float32 as three parts of bfloat16, of which those of Q lie in shared memory as well.
    split_wgmma = c.has_wgmma and c.split_products and c.BLOCK_M >= 64 and c.num_warps >= 4
    if split_wgmma:
        return floor(2 * c.BLOCK_M * c.v_padded / threads + 4 * scores) + 24
    if c.is_hip and c.warp_size == 32:
        # Each half of a wave holds whole operands. Warps beyond the rows share out the keys.
        rows = max(c.BLOCK_M, 16 * c.num_warps)
        shared_keys = c.BLOCK_M * c.BLOCK_N * c.num_stages / rows
        held_keys = 2 * shared_keys * words * (c.qk_padded + c.v_padded) / c.warp_size
        # Of wide heads the rows are read again from shared memory, a part at a time.
        held_rows = min(2 * c.qk_padded * rows * words / threads, 128)
        return gathered + floor((2 * held_keys + 2 * held_rows + 4 * made) / 3) + 24
    q = c.BLOCK_M * c.qk_padded * words / threads
    keys = c.BLOCK_N * c.qk_padded * words / threads
    if c.is_hip:
        return floor(3 * keys + 3 * made / 2 + 3 * q / 2) + 120
    if c.BLOCK_M < 16 * c.num_warps:
        return floor(3 * keys / 2 + made) + 100
    return floor(c.BLOCK_N * words / 2 + made + q) + 40


def estimate(c: RuleCase) -> None:
    """Write into a case what its config takes."""
    c.shared_memory = shared_memory(c)
    c.registers = registers(c)


RULES: Rules[RuleCase] = Rules(
    shape=(
        Rule(
            "hints",
            "the compiler for {arch} does not know the hints of {config}",
            lambda c: (
                (c.matrix_rows == 0 and c.waves_per_eu == 0)
                or (
                    c.is_hip
                    and c.waves_per_eu <= 8
                    and (
                        c.matrix_rows == 0
                        or c.matrix_rows == 16
                        or (c.matrix_rows == 32 and c.warp_size != 32)
                    )
                )
            ),
        ),
        Rule(
            "power of two",
            "BLOCK_M={BLOCK_M} is not a power of two of at least 16",
            lambda c: c.BLOCK_M >= 16 and 65536 % c.BLOCK_M == 0,
        ),
        Rule(
            "power of two",
            "BLOCK_N={BLOCK_N} is not a power of two of at least 16",
            lambda c: c.BLOCK_N >= 16 and 65536 % c.BLOCK_N == 0,
        ),
        Rule(
            "warps",
            "num_warps={num_warps} is not one of 1, 2, 4, 8, 16",
            lambda c: c.num_warps >= 1 and 16 % c.num_warps == 0,
        ),
        Rule(
            "stages",
            "num_stages={num_stages} is not between 1 and 8",
            lambda c: c.num_stages >= 1 and c.num_stages <= 8,
        ),
        Rule("splits", "num_splits={num_splits} is below 0", lambda c: c.num_splits >= 0),
        Rule("order", "the order of {config} is none of those there are", lambda c: c.known_order),
    ),
    fit=(
        Rule(
            "dtype",
            "float8 is multiplied by the Gluon template alone, on Hopper",
            lambda c: c.itemsize >= 2,
        ),
        Rule(
            "mask block",
            "BLOCK_M={BLOCK_M} is wider than the mask's block of {mask_rows}",
            lambda c: c.mask_rows == 0 or c.BLOCK_M <= c.rows_cover,
        ),
        Rule(
            "mask block",
            "BLOCK_N={BLOCK_N} is wider than the mask's block of {mask_keys}",
            lambda c: c.mask_keys == 0 or c.BLOCK_N <= c.keys_cover,
        ),
        Rule(
            "warps",
            "num_warps={num_warps} share {BLOCK_M} rows of float32, which warpgroups split by 64",
            lambda c: (
                16 * c.num_warps <= c.BLOCK_M
                or not (c.has_wgmma and c.split_products and c.BLOCK_M >= 64 and c.num_warps >= 4)
            ),
        ),
        Rule("tma", "use_tma: {arch} has no TMA", lambda c: c.has_tma or not c.use_tma),
        Rule(
            "tma",
            "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda c: c.dense_layout or not c.use_tma,
        ),
        Rule(
            "tma",
            "use_tma: head dimension {qk_dim} is not one tile of at most 256",
            lambda c: not c.use_tma or (c.qk_tiles == 1 and c.qk_padded <= 256),
        ),
        Rule(
            "tma",
            "use_tma: head dimension {v_dim} is not one tile of at most 256",
            lambda c: not c.use_tma or (c.v_tiles == 1 and c.v_padded <= 256),
        ),
        Rule(
            "shared memory",
            "shared memory: about {shared_memory} bytes, {device} has {shared_limit}",
            lambda c: c.shared_memory <= c.shared_limit,
        ),
        Rule(
            "registers",
            "registers: about {registers} a thread, {arch} has {thread_registers}",
            lambda c: c.registers <= c.thread_registers,
        ),
        Rule(
            "occupancy",
            "occupancy: about {registers} registers a thread in {num_warps} warps, an SM of "
            "{arch} has {sm_registers}",
            lambda c: c.num_warps * c.registers * c.warp_size <= c.sm_registers,
        ),
    ),
    worth=(
        Rule(
            "headroom",
            "headroom: about {registers} registers a thread leave few of {thread_registers}",
            lambda c: (
                (c.is_hip and c.warp_size == 32)
                or 4 * c.registers <= 3 * c.thread_registers
                or (c.has_wgmma and c.split_products and c.BLOCK_M >= 64 and c.num_warps >= 4)
            ),
        ),
        Rule(
            "idle warps",
            "idle warps: {num_warps} on {BLOCK_M} rows",
            lambda c: c.decodes or c.v_padded > 128 or 16 * c.num_warps <= c.BLOCK_M,
        ),
        Rule(
            "slower loads",
            "slower loads: TMA could read the tiles",
            lambda c: (
                c.decodes
                or c.use_tma
                or not (
                    c.dense_layout
                    and c.has_tma
                    and c.qk_tiles == 1
                    and c.v_tiles == 1
                    and c.qk_padded <= 256
                    and c.v_padded <= 256
                )
            ),
        ),
    ),
)
