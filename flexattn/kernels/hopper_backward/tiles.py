"""Programs and sizes of a launch of the Hopper backward, and the form that a problem takes."""

from __future__ import annotations

from dataclasses import replace

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, walks_runs
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.ptx.assembler import waits_meet
from flexattn.problem import Problem, Structure

# One block fills an SM, of which a Hopper has 132 at most.
BLOCKS_AT_ONCE = 128
# Where blocks add to dq in their turns, so many of a head start side by side: each starts a few
# tiles of queries behind the one before.
DETERMINISTIC_AT_ONCE = 4


def at_sizes(config: HopperBackwardConfig, problem: Problem) -> HopperBackwardConfig:
    """The config in the form that a problem's heads and keys allow.

    With dropout a block of tall tiles, and every one of Triton 3.9, counts heads also where each
    key head has one: ptxas then spills less.
    """
    counts = problem.structure.dropout and (config.BLOCK_M == 128 or waits_meet())
    return replace(
        config,
        mha=_shared_heads(problem) == 1 and not counts,
        even_n=problem.kv_len % config.BLOCK_N == 0,
    )


def backward_grid(problem: Problem, config: HopperBackwardConfig, device: Device) -> Geometry:
    """A program for each tile of keys of each key head, or for each SM.

    Raises ConfigError for another form than a problem's.
    """
    allowed = at_sizes(config, problem)
    if config.mha > allowed.mha or config.even_n > allowed.even_n:
        raise ConfigError(
            f"{config} for {problem.describe()}",
            "mha is of problems with as many key heads as query heads, even_n of lengths "
            "that BLOCK_N divides",
            f"use {allowed}",
        )
    sizes = sizes_of_launch(problem, config)
    tiles = sizes["num_tiles"] * sizes["kv_units"]
    programs = min(tiles, device.num_sms) if config.persistent else tiles
    return Geometry(programs, sizes["num_tiles"], tiles)


def sizes_of_launch(problem: Problem, config: HopperBackwardConfig) -> dict[str, int]:
    """Numbers that the kernels take beside lengths and heads.

    num_queries: tiles of queries of a head, for which there is scratch memory: a mask's lists name
    all tiles of a block. kv_units: key heads of all batches. section_heads: those whose tiles
    start side by side, about as many as the device has SMs for, or a few times as many.
    shared_heads: query heads, of all batches, that read the same keys.
    """
    rows, sparsity = config.BLOCK_M, problem.structure.sparsity
    if sparsity is not None and not walks_runs(problem.structure, config):
        rows = sparsity.q_block
    num_tiles = -(-problem.kv_len // config.BLOCK_N)
    at_once = min(num_tiles, DETERMINISTIC_AT_ONCE) if config.deterministic else num_tiles
    return {
        "num_heads": problem.Hkv,
        "num_tiles": num_tiles,
        "num_queries": -(-problem.q_len // rows) * (rows // config.BLOCK_M),
        "kv_units": problem.Hkv * _batches(problem),
        "section_heads": max(1, BLOCKS_AT_ONCE * config.waves // at_once),
        "shared_heads": _shared_heads(problem),
    }


def trims_runs(structure: Structure, config: HopperBackwardConfig) -> bool:
    """Whether the ends of a mask's runs are trimmed before: in order, all listed blocks count."""
    return config.trimmed and not config.deterministic and walks_runs(structure, config)


def _batches(problem: Problem) -> int:
    return 1 if problem.broadcast_kv else problem.B


def _shared_heads(problem: Problem) -> int:
    return problem.Hq // problem.Hkv * (problem.B // max(1, _batches(problem)))
