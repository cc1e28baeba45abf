"""The Triton templates' tiles: cut to a mask's blocks, and the grid that covers a problem."""

from __future__ import annotations

from dataclasses import replace

from flexattn.device import Device
from flexattn.kernels.base.tiles import Geometry, tile_for, tiles_per_q
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, TritonConfigT
from flexattn.problem import Problem, Structure


def fit_to_mask(config: TritonConfigT, structure: Structure) -> TritonConfigT:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    return replace(
        config,
        BLOCK_M=tile_for(config.BLOCK_M, sparsity.q_block * structure.packed_heads),
        BLOCK_N=tile_for(config.BLOCK_N, sparsity.kv_block),
    )


def prefill_grid(problem: Problem, config: PrefillConfig) -> Geometry:
    """A program for each row tile of each head."""
    tiles, units = _units(problem, config)
    return Geometry(units, tiles, units)


def decode_grid(problem: Problem, config: DecodeConfig, device: Device) -> Geometry:
    """A program for each split of a row tile's keys.

    Splits fill the SMs once, and none is without a tile of keys.
    """
    tiles, units = _units(problem, config)
    key_tiles = max(1, -(-problem.kv_len // config.BLOCK_N))
    # No unit where there is no row: nothing is launched then.
    splits = config.num_splits or max(1, device.num_sms // max(1, units))
    splits = min(splits, key_tiles)
    return Geometry(units * splits, tiles, units, splits)


def _units(problem: Problem, config: PrefillConfig | DecodeConfig) -> tuple[int, int]:
    """Row tiles of the heads that share theirs, and of all heads."""
    tiles = _row_tiles(problem, config)
    return tiles, problem.B * (problem.Hq // problem.structure.packed_heads) * tiles


def _row_tiles(problem: Problem, config: PrefillConfig | DecodeConfig) -> int:
    structure, sparsity = problem.structure, problem.structure.sparsity
    tiles = -(-problem.q_len * structure.packed_heads // config.BLOCK_M)
    if sparsity is None:
        return tiles
    if structure.kind == "decode" or sparsity.q_block % config.BLOCK_M:
        blocks = -(-problem.q_len // sparsity.q_block)
        per_block = tiles_per_q(structure, config)
        return min(per_block, tiles) if blocks == 1 else blocks * per_block
    return tiles
