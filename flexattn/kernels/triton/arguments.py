"""Arguments of the Triton templates' kernels."""

from __future__ import annotations

from flexattn.kernels.base.arguments import (
    Argument,
    attention_arguments,
    descriptor,
    output_strides,
    outputs,
    sinks,
)
from flexattn.kernels.base.config import pieces
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.problem import Structure

_WORKSPACE = Argument("WORKSPACE", "*fp32", 16)
_SPLITS = (Argument("num_splits", "i32"), Argument("num_rows", "i64"))


def prefill_arguments(structure: Structure, config: PrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the prefill kernel, in order."""
    if not config.use_tma:
        return attention_arguments(structure, config)
    qk, v = (pieces(dim)[0][1] for dim in (structure.head_dim_qk, structure.head_dim_v))
    tiles = (("Q", config.BLOCK_M, qk), ("K", config.BLOCK_N, qk), ("V", config.BLOCK_N, v))
    described = (descriptor(x, structure.dtype_of(x.lower()), *tile) for x, *tile in tiles)
    return attention_arguments(structure, config, dict(described))


def decode_arguments(structure: Structure, config: DecodeConfig) -> tuple[Argument, ...]:
    """Arguments of the decode kernel, in order."""
    return attention_arguments(structure, config, {}, (_WORKSPACE,), _SPLITS)


def combine_arguments(structure: Structure) -> tuple[Argument, ...]:
    """Arguments of the kernel that merges the partial results of decode's splits."""
    sizes = (Argument("Hq", "i32"), Argument("q_len", "i32"), *_SPLITS)
    return (_WORKSPACE, *outputs(structure), *sinks(structure), *output_strides(structure), *sizes)
