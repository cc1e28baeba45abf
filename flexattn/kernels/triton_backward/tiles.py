"""Tiles of the Triton backward against a mask's blocks, and the programs that cover a problem."""

from __future__ import annotations

from dataclasses import replace

from flexattn.kernels.base.tiles import Geometry, tile_for
from flexattn.kernels.base.vanishing import skips_vanished
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.problem import Problem, Sparsity, Structure


def fit_to_mask(config: BackwardConfig, structure: Structure) -> BackwardConfig:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    return replace(
        config,
        BLOCK_M1=tile_for(config.BLOCK_M1, sparsity.q_block),
        BLOCK_N1=tile_for(config.BLOCK_N1, sparsity.kv_block),
        BLOCK_M2=tile_for(config.BLOCK_M2, sparsity.q_block),
        BLOCK_N2=tile_for(config.BLOCK_N2, sparsity.kv_block),
    )


def reads_runs(structure: Structure, config: BackwardConfig) -> bool:
    """Whether the kernel walks a mask's runs, in both directions: whole tiles of whole blocks."""
    sparsity = structure.sparsity
    if sparsity is None or not sparsity.runs:
        return False
    rows, keys = (config.BLOCK_M1, config.BLOCK_M2), (config.BLOCK_N1, config.BLOCK_N2)
    return not any(sparsity.q_block % size for size in rows) and not any(
        sparsity.kv_block % size for size in keys
    )


def skips_blocks(structure: Structure, config: BackwardConfig) -> tuple[int, int] | None:
    """Rows and keys of the tiles that are left out where weights vanish; None where none are.

    The tiles of the kernel's halves, dK with dV and dQ, are multiples of these.
    """
    walks = structure.sparsity is None or reads_runs(structure, config)
    if not walks or not skips_vanished(structure, config):
        return None
    return min(config.BLOCK_M1, config.BLOCK_M2), min(config.BLOCK_N1, config.BLOCK_N2)


def tile_counts(sparsity: Sparsity, config: BackwardConfig) -> dict[str, int]:
    """How many tiles cover a block, by the names of a kernel's constants."""
    return {
        "TILES_PER_Q1": -(-sparsity.q_block // config.BLOCK_M1),
        "TILES_PER_KV1": -(-sparsity.kv_block // config.BLOCK_N1),
        "TILES_PER_Q2": -(-sparsity.q_block // config.BLOCK_M2),
        "TILES_PER_KV2": -(-sparsity.kv_block // config.BLOCK_N2),
    }


def backward_grid(problem: Problem, config: BackwardConfig) -> Geometry:
    """Programs for the keys of each KV head, then one for each row tile of each query head."""
    sizes = sizes_of_launch(problem, config)
    units = sizes["q_units"] * sizes["q_tiles"]
    return Geometry(sizes["kv_programs"] + units, sizes["q_tiles"], units)


def sizes_of_launch(problem: Problem, config: BackwardConfig) -> dict[str, int]:
    """Numbers that the kernel takes beside lengths and heads.

    shared_heads: query heads, of all batches, that read the same keys.
    """
    batches = 1 if problem.broadcast_kv else problem.B
    sparsity = problem.structure.sparsity
    kv_tiles = _tiles(problem.kv_len, config.BLOCK_N1, sparsity.kv_block if sparsity else 0)
    q_tiles = _tiles(problem.q_len, config.BLOCK_M2, sparsity.q_block if sparsity else 0)
    kv_units = batches * problem.Hkv
    return {
        "shared_heads": problem.Hq // problem.Hkv * (problem.B // max(batches, 1)),
        "kv_units": kv_units,
        "kv_programs": kv_units * kv_tiles,
        "q_units": problem.B * problem.Hq,
        "q_tiles": q_tiles,
    }


def _tiles(length: int, tile: int, block: int) -> int:
    """Tiles that cover a length; none of them reaches over the end of a block."""
    if not block or block % tile == 0:
        return -(-length // tile)
    per_block = -(-block // tile)
    blocks = -(-length // block)
    return min(per_block, -(-length // tile)) if blocks == 1 else blocks * per_block
