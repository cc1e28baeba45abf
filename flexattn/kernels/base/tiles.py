"""Tiles against a mask's blocks and a grid: how wide they may be, how many cover a problem."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Config
from flexattn.problem import Structure

__all__ = ["Geometry", "check_power", "power_above", "tile_for", "tiles_per_q", "walks_runs"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The grid of a launch: programs, row tiles, work tiles, and splits of the keys (1: prefill).

    num_tiles: of one head, or of heads that share their tiles. num_work_tiles: row tiles of all
    heads and batches, of which a program takes one or more.
    """

    programs: int
    num_tiles: int
    num_work_tiles: int
    num_splits: int = 1


def tiles_per_q(structure: Structure, config: Config) -> int:
    """Row tiles of one sparse query block; 1 without a block mask."""
    if structure.sparsity is None:
        return 1
    return -(-structure.sparsity.q_block * structure.packed_heads // config.BLOCK_M)


def walks_runs(structure: Structure, config: Config) -> bool:
    """Whether the kernel walks a mask's runs: whole tiles from one end to the other, no lists."""
    sparsity = structure.sparsity
    return sparsity is not None and sparsity.runs and sparsity.kv_block % config.BLOCK_N == 0


def power_above(block: int) -> int:
    """The narrowest tile that covers a block: a power of two of at least 16."""
    return max(16, 1 << (block - 1).bit_length())


def check_power(name: str, size: int) -> None:
    """Raise ConfigError for a tile of kernel_options that is no power of two of at least 16."""
    if size < 16 or size & (size - 1):
        raise ConfigError(
            f"kernel_options[{name!r}]={size}", f"{name} is a power of two of at least 16"
        )


def tile_for(tile: int, block: int) -> int:
    """The widest tile not above this one that divides the block, or else that covers it."""
    dividing = block & -block
    if dividing >= 16:
        return min(tile, dividing)
    return min(tile, power_above(block))
