"""The numbers of one case that the symbols of Hopper's feasibility stand for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.features import loads_by_key, loads_diagonals, loads_tiles, tma_layout
from flexattn.kernels.hopper.config import (
    CONSUMER_ROWS,
    HOPPER_ORDERS,
    TILE_SCHEDULERS,
    HopperPrefillConfig,
)
from flexattn.kernels.hopper.printed import RuleCase
from flexattn.problem import Structure

# Columns of Q, K and the output in one TMA copy where head dimensions are any: 128 bytes, which is
# the widest swizzle.
BOX = 64
# Columns of the widest accumulator that two consumers have registers for. Above them Q and K, too,
# are copied in parts.
WIDEST = 256


def case_of(config: HopperPrefillConfig, structure: Structure, device: Device) -> RuleCase:
    """What the symbols of stated/gluon.py stand for; nothing is estimated yet."""
    return RuleCase(
        config.consumers,
        config.BLOCK_N,
        config.num_stages,
        config.consumer_regs,
        config.producer_regs,
        config.ping_pong,
        config.tile_scheduler != "grid",
        config.order in HOPPER_ORDERS and config.tile_scheduler in TILE_SCHEDULERS,
        config.l2_swizzle,
        config.q_in_regs,
        config.lazy_rescale,
        1 if config.fp8_pv else 2,
        config.heads,
        config.v_box,
        config.v_parts,
        config.k_parts,
        *_fixed(structure, device, config.BLOCK_N, config.v_box, config.v_parts),
    )


@lru_cache(maxsize=1024)
def _fixed(
    structure: Structure, device: Device, keys: int, v_box: int, v_parts: int
) -> tuple[Any, ...]:
    unit = CONSUMER_ROWS, keys
    qk, v, sparsity = structure.head_dim_qk, structure.head_dim_v, structure.sparsity
    blocks = (0, 0, False)
    if sparsity is not None:
        blocks = (sparsity.q_block, sparsity.kv_block, sparsity.runs)
    facts = (
        structure.kind == "decode",
        structure.score is not None,
        loads_by_key(structure, unit) or loads_diagonals(structure),
        loads_tiles(structure, unit),
        tma_layout(structure),
        sparsity is not None and sparsity.per_head,
        structure.kv_dtype != "",
    )
    limits = (device.shared_memory, device.has_wgmma)
    # Tiles of K are copied in parts of 64 columns where their width is no power of two.
    values = padded_columns(-(-v // v_parts))
    held = (copied_columns(qk), values, values, values)
    if v_box:
        held = (whole_boxes(qk, BOX), padded_columns(v), whole_boxes(v, BOX), multiplied(v, v_box))
    return (structure.itemsize, qk, v, *held, *blocks, *facts, *limits)


def padded_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory: a power of two of at least 64."""
    return max(64, power_above(head_dim))


def copied_columns(head_dim: int) -> int:
    """Columns of a tile of Q or K, in parts where they are no power of two."""
    return head_dim if head_dim % BOX == 0 else padded_columns(head_dim)


def part_columns(head_dim: int, k_parts: int) -> int:
    """Columns of one copy of Q, K and the output, of head dimensions above WIDEST."""
    return 2 * BOX if head_dim % (2 * BOX * k_parts) == 0 else BOX


def whole_boxes(head_dim: int, box: int) -> int:
    """Columns of as many boxes as cover a head dimension."""
    return -(-head_dim // box) * box


def multiplied(head_dim: int, v_box: int) -> int:
    """Columns of V that wgmma multiplies: N of one is a multiple of 8.

    Boxes narrower than 64 are whole: the manual tells of no N that ends within a swizzle's width.
    """
    return whole_boxes(head_dim, 8 if v_box == BOX else v_box)
