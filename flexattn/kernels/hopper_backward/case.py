"""The numbers of one case that the symbols of the Hopper backward's feasibility stand for."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.features import tma_layout
from flexattn.kernels.hopper_backward.config import (
    BACKWARD_REGISTERS,
    EARLY,
    PIPELINED,
    HopperBackwardConfig,
    columns,
)
from flexattn.kernels.hopper_backward.masks import loads_pairs, sums_diagonals
from flexattn.kernels.hopper_backward.printed import RuleCase
from flexattn.problem import Structure


def case_of(config: HopperBackwardConfig, structure: Structure, device: Device) -> RuleCase:
    """What the symbols of stated/hopper_backward.py stand for; nothing is estimated yet."""
    sparsity = structure.sparsity
    blocks = (0, 0) if sparsity is None else (sparsity.q_block, sparsity.kv_block)
    return RuleCase(
        config.BLOCK_M,
        config.BLOCK_N,
        config.num_stages,
        config.ds_stages,
        config.pipelined != "",
        config.pipelined == "dq",
        config.ping_pong,
        config.dq_tma,
        config.dq_halves,
        config.deterministic,
        config.by_product,
        config.persistent,
        config.pipelined in PIPELINED
        and config.early_lse in EARLY
        and 0 <= config.ex2_emulated <= 8,
        structure.itemsize,
        structure.head_dim_qk,
        structure.head_dim_v,
        columns(structure),
        *blocks,
        structure.kv_dtype == "",
        tma_layout(structure),
        structure.grads != (),
        not sums_diagonals(structure),
        structure.dropout,
        loads_pairs(structure),
        device.has_wgmma,
        device.shared_memory,
        BACKWARD_REGISTERS,
    )
