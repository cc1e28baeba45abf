"""Programs and sizes of a launch of the Hopper backward, and the form that a problem takes."""

from __future__ import annotations

from dataclasses import replace

from flexattn.errors import ConfigError
from flexattn.kernels.base.tiles import Geometry, walks_runs
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.problem import Problem


def at_sizes(config: HopperBackwardConfig, problem: Problem) -> HopperBackwardConfig:
    """The config in the form that a problem's heads and keys allow."""
    return replace(
        config,
        one_head=_shared_heads(problem) == 1,
        even_keys=problem.kv_len % config.BLOCK_N == 0,
    )


def backward_grid(problem: Problem, config: HopperBackwardConfig) -> Geometry:
    """A program for each tile of keys of each key head; raises ConfigError for another form."""
    allowed = at_sizes(config, problem)
    if config.one_head > allowed.one_head or config.even_keys > allowed.even_keys:
        raise ConfigError(
            f"{config} for {problem.describe()}",
            "one_head is of problems with as many key heads as query heads, even_keys of lengths "
            "that BLOCK_N divides",
            f"use {allowed}",
        )
    sizes = sizes_of_launch(problem, config)
    heads = sizes["num_heads"] * _batches(problem)
    return Geometry(sizes["num_tiles"] * heads, sizes["num_tiles"], sizes["num_tiles"] * heads)


def sizes_of_launch(problem: Problem, config: HopperBackwardConfig) -> dict[str, int]:
    """Numbers that the kernels take beside lengths and heads.

    num_queries: tiles of queries of a head, for which there is scratch memory: a mask's lists name
    all tiles of a block. shared_heads: query heads, of all batches, that read the same keys.
    """
    rows, sparsity = config.BLOCK_M, problem.structure.sparsity
    if sparsity is not None and not walks_runs(problem.structure, config):
        rows = sparsity.q_block
    return {
        "num_heads": problem.Hkv,
        "num_tiles": -(-problem.kv_len // config.BLOCK_N),
        "num_queries": -(-problem.q_len // rows) * (rows // config.BLOCK_M),
        "shared_heads": _shared_heads(problem),
    }


def _batches(problem: Problem) -> int:
    return 1 if problem.broadcast_kv else problem.B


def _shared_heads(problem: Problem) -> int:
    return problem.Hq // problem.Hkv * (problem.B // max(1, _batches(problem)))
