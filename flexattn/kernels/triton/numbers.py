"""The numbers of one case that the symbols of the Triton templates' feasibility stand for."""

from __future__ import annotations

from functools import lru_cache

from flexattn.device import Device
from flexattn.kernels.base.config import padded, pieces
from flexattn.kernels.base.features import (
    compares_numbers,
    loads_by_key,
    loads_tiles,
    multiplies_ramp,
    tma_layout,
)
from flexattn.kernels.base.tiles import power_above
from flexattn.kernels.triton.config import ORDERS, DecodeConfig, PrefillConfig
from flexattn.problem import Structure

__all__ = ["numbers"]


def numbers(
    config: PrefillConfig | DecodeConfig, structure: Structure, device: Device
) -> tuple[int, ...]:
    """What SYMBOLS of stated/symbols.py stand for, in their order; truth values are bools."""
    return (
        config.BLOCK_M,
        config.BLOCK_N,
        config.num_warps,
        config.num_stages,
        config.num_splits if isinstance(config, DecodeConfig) else 0,
        isinstance(config, PrefillConfig) and config.use_tma,
        not isinstance(config, PrefillConfig) or config.order in ORDERS,
        *_fixed(structure, device),
    )


@lru_cache(maxsize=1024)
def _fixed(structure: Structure, device: Device) -> tuple[int, ...]:
    qk, v = structure.head_dim_qk, structure.head_dim_v
    rows, keys = 0, 0
    if structure.sparsity is not None:
        rows = structure.sparsity.q_block * structure.packed_heads
        keys = structure.sparsity.kv_block
    sizes = (structure.itemsize, qk, v, padded(qk), padded(v), len(pieces(qk)), len(pieces(v)))
    blocks = (rows, keys, power_above(rows), power_above(keys))
    facts = (
        structure.kind == "decode",
        structure.dtype == "float32" and not structure.tf32,
        loads_by_key(structure) and not compares_numbers(structure),
        loads_tiles(structure),
        multiplies_ramp(structure, device),
        tma_layout(structure),
    )
    limits = (device.shared_memory, device.registers, device.max_registers, device.warp_size)
    engines = (device.has_tma, device.has_wgmma, device.backend == "hip")
    return (*sizes, *blocks, *facts, *limits, *engines)
