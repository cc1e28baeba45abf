"""Tiles against a mask's blocks and a grid: how wide they may be, how many cover a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Config, DecodeConfig, GluonPrefillConfig
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, CONSUMER_ROWS
from flexattn.problem import Problem, Sparsity, Structure

__all__ = [
    "Geometry",
    "geometry",
    "power_above",
    "shares_keys",
    "suited",
    "tiles_per_q",
    "walks_runs",
]

AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The grid of a launch: programs, row tiles, and splits of the keys (1 for prefill).

    num_tiles: of one head, or of heads that share their tiles.
    """

    programs: int
    num_tiles: int
    num_splits: int


def geometry(problem: Problem, config: Config, device: Device) -> Geometry:
    """Programs of a launch. Splits fill the SMs once, and none is without a tile of keys.

    Raises ConfigError for heads of a tile that do not share keys.
    """
    if not shares_keys(problem, config):
        raise ConfigError(
            f"packed: {_heads(problem, config)} heads in a tile of groups of "
            f"{problem.Hq // problem.Hkv}",
            "the heads of a tile share one KV head",
            "take a number of consumers that divides the group, or packed=False",
        )
    num_tiles = _row_tiles(problem, config)
    units = problem.B * (problem.Hq // _heads(problem, config)) * num_tiles
    if isinstance(config, GluonPrefillConfig) and config.schedule != "grid":
        return Geometry(min(units, device.num_sms), num_tiles, 1)
    if not isinstance(config, DecodeConfig):
        return Geometry(units, num_tiles, 1)
    key_tiles = max(1, -(-problem.kv_len // config.BLOCK_N))
    # No unit where there is no row: nothing is launched then.
    splits = config.num_splits or max(1, device.num_sms // max(1, units))
    splits = min(splits, key_tiles)
    return Geometry(units * splits, num_tiles, splits)


def shares_keys(problem: Problem, config: Config) -> bool:
    """Whether the heads of a tile are of one group, in any of the templates."""
    return problem.Hq // problem.Hkv % _heads(problem, config) == 0


def tiles_per_q(structure: Structure, config: Config) -> int:
    """Row tiles of one sparse query block; 1 without a block mask."""
    if structure.sparsity is None:
        return 1
    return -(-structure.sparsity.q_block * structure.packed_heads // config.BLOCK_M)


def walks_runs(structure: Structure, config: Config) -> bool:
    """Whether the kernel walks a mask's runs: whole tiles from one end to the other, no lists."""
    sparsity = structure.sparsity
    return sparsity is not None and sparsity.runs and sparsity.kv_block % config.BLOCK_N == 0


def suited(config: AnyConfig, structure: Structure) -> AnyConfig:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    if isinstance(config, GluonPrefillConfig):
        return _with_consumers(config, sparsity)  # type: ignore[return-value]
    rows = sparsity.q_block * structure.packed_heads
    return replace(
        config,
        BLOCK_M=_tile_for(config.BLOCK_M, rows),
        BLOCK_N=_tile_for(config.BLOCK_N, sparsity.kv_block),
    )


def _with_consumers(config: GluonPrefillConfig, sparsity: Sparsity) -> GluonPrefillConfig:
    """With as many consumers as divide a block of rows, where any number of them does.

    Along runs it is enough that the rows of one do.
    """
    width = _tile_for(config.BLOCK_N, sparsity.kv_block)
    if sparsity.runs and sparsity.q_block % CONSUMER_ROWS == 0:
        return replace(config, BLOCK_N=width)
    if config.packed:
        return replace(config, BLOCK_N=width)
    for count in range(config.consumers, 0, -1):
        if sparsity.q_block % (CONSUMER_ROWS * count) == 0:
            break
    else:
        return replace(config, BLOCK_N=width)
    if count == config.consumers:
        return replace(config, BLOCK_N=width)
    return replace(
        config,
        consumers=count,
        BLOCK_N=width,
        registers=CONSUMER_REGISTERS[count],
        ping_pong=config.ping_pong and count > 1,
    )


def power_above(block: int) -> int:
    """The narrowest tile that covers a block: a power of two of at least 16."""
    return max(16, 1 << (block - 1).bit_length())


def _tile_for(tile: int, block: int) -> int:
    """The widest tile not above this one that divides the block, or else that covers it."""
    dividing = block & -block
    if dividing >= 16:
        return min(tile, dividing)
    return min(tile, power_above(block))


def _heads(problem: Problem, config: Config) -> int:
    """Query heads whose rows one tile holds."""
    if isinstance(config, GluonPrefillConfig):
        return config.heads
    return problem.structure.packed_heads


def _row_tiles(problem: Problem, config: Config) -> int:
    structure, sparsity = problem.structure, problem.structure.sparsity
    rows = problem.q_len * structure.packed_heads
    tiles = -(-rows // config.BLOCK_M)
    if sparsity is None or isinstance(config, GluonPrefillConfig):
        return tiles
    if structure.kind == "decode" or sparsity.q_block % config.BLOCK_M:
        blocks = -(-problem.q_len // sparsity.q_block)
        per_block = tiles_per_q(structure, config)
        return min(per_block, tiles) if blocks == 1 else blocks * per_block
    return tiles
