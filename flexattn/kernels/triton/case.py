"""The numbers of one case that the symbols of the Triton templates' feasibility stand for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base import features
from flexattn.kernels.base.config import padded, pieces, power_above
from flexattn.kernels.triton import printed
from flexattn.kernels.triton.amd import AmdDecodeConfig, AmdPrefillConfig, limited
from flexattn.kernels.triton.config import ORDERS, DecodeConfig, PrefillConfig
from flexattn.problem import Structure

_HINTED = (AmdPrefillConfig, AmdDecodeConfig)


def case_of(
    config: PrefillConfig | DecodeConfig, structure: Structure, device: Device
) -> printed.RuleCase:
    """What the symbols of stated/symbols.py stand for; nothing is estimated yet."""
    splits, use_tma, known_order, waves, rows = 0, False, True, 0, 0
    if isinstance(config, DecodeConfig):
        splits = config.num_splits
    else:
        use_tma, known_order = config.use_tma, config.order in ORDERS
    if isinstance(config, _HINTED):
        waves, rows = config.waves_per_eu, config.matrix_instr_nonkdim
        device = limited(device, config)
    return printed.RuleCase(
        config.BLOCK_M,
        config.BLOCK_N,
        config.num_warps,
        config.num_stages,
        splits,
        use_tma,
        known_order,
        waves,
        rows,
        *_fixed(structure, device),
    )


@lru_cache(maxsize=1024)
def _fixed(structure: Structure, device: Device) -> tuple[Any, ...]:
    qk, v = structure.head_dim_qk, structure.head_dim_v
    rows, keys = 0, 0
    if structure.sparsity is not None:
        rows = structure.sparsity.q_block * structure.packed_heads
        keys = structure.sparsity.kv_block
    sizes = (structure.itemsize, qk, v, padded(qk), padded(v), len(pieces(qk)), len(pieces(v)))
    blocks = (rows, keys, power_above(rows), power_above(keys))
    products = features.fp32_products(structure)
    facts = (
        structure.kind == "decode",
        products == "ieee",
        products == "bf16x6",
        features.loads_by_key(structure) and not features.compares_numbers(structure),
        features.loads_tiles(structure),
        features.multiplies_ramp(structure, device),
        features.tma_layout(structure),
    )
    limits = (device.shared_memory, device.registers, device.max_registers, device.warp_size)
    engines = (device.has_tma, device.has_wgmma, device.backend == "hip")
    return (*sizes, *blocks, *facts, *limits, *engines)
