"""Hopper's prefill against a mask's blocks and a device: its consumers, and its grid."""

from __future__ import annotations

from dataclasses import replace

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.tiles import Geometry, tile_for
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, CONSUMER_ROWS, HopperPrefillConfig
from flexattn.problem import Problem, Structure


def shares_keys(problem: Problem, config: HopperPrefillConfig) -> bool:
    """Whether the heads of a tile are of one group."""
    return problem.Hq // problem.Hkv % config.heads == 0


def grid(problem: Problem, config: HopperPrefillConfig, device: Device) -> Geometry:
    """A program for each row tile of the heads that share one, or one for each SM.

    Raises ConfigError for heads of a tile that do not share keys.
    """
    if not shares_keys(problem, config):
        raise ConfigError(
            f"pack_gqa: {config.heads} heads in a tile of groups of {problem.Hq // problem.Hkv}",
            "the heads of a tile share one KV head",
            "take a number of consumers that divides the group, or pack_gqa=False",
        )
    tiles = -(-problem.q_len // config.BLOCK_M)
    units = problem.B * (problem.Hq // config.heads) * tiles * config.v_parts
    return Geometry(min(units, device.num_sms) if config.persistent else units, tiles, units)


def fit_to_mask(config: HopperPrefillConfig, structure: Structure) -> HopperPrefillConfig:
    """The config with its keys, and its consumers where fewer divide a block, cut to the mask's.

    Along runs it is enough that the rows of one consumer do.
    """
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    config = replace(config, BLOCK_N=tile_for(config.BLOCK_N, sparsity.kv_block))
    one_divides = sparsity.runs and sparsity.q_block % CONSUMER_ROWS == 0
    if one_divides or config.pack_gqa:
        return config
    counts = range(config.consumers, 0, -1)
    dividing = (count for count in counts if sparsity.q_block % (CONSUMER_ROWS * count) == 0)
    return with_consumers(config, next(dividing, config.consumers))


def with_consumers(config: HopperPrefillConfig, count: int) -> HopperPrefillConfig:
    """The config with another number of consumers, each with heads of all its rows."""
    if count == config.consumers:
        return config
    return replace(
        config,
        consumers=count,
        consumer_regs=CONSUMER_REGISTERS.get(count, config.consumer_regs),
        ping_pong=config.ping_pong and count > 1,
        pack_gqa=False,
    )
