"""What Triton's decode is expected to take on Hopper: splits over SMs, each with its keys.

A program takes a step for each tile of its keys; programs that share an SM overlap theirs. Keys
are read once, so memory bounds it from below, and splits cost a merge. `python -m bench.fit_costs`
finds the numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.config import padded
from flexattn.kernels.base.estimate import Estimate, bandwidth
from flexattn.kernels.triton.config import DecodeConfig
from flexattn.kernels.triton.tiles import decode_grid
from flexattn.problem import ITEMSIZE, Problem
from flexattn.problem.mask_class import kept


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Microseconds of tiles of 16 rows, fitted to 111 records and 4 studies of an H200.

    In the median times are off by 4.4 %, ratios of numbers of splits by 2.4 %.

    launch: of a graph whose L2 is cold. step: of a tile of keys, and per_key of each key of 256
    columns that 16 rows meet. exposed: what a tile waits for its loads with fewer than three
    stages. eight_warps: factor of per_key where eight warps share a tile. busy: per_key of an SM
    whose programs keep it busy. merge, per_split: of the kernel that merges splits; parts: the
    time to write and read what splits leave, over what memory's bandwidth alone gives. memory: the
    part of its bandwidth that is reached.
    """

    launch: float = 6.89
    step: float = 0.422
    per_key: float = 0.00527
    exposed: float = 0.414
    eight_warps: float = 1.28
    busy: float = 0.00804
    merge: float = 2.47
    per_split: float = 0.117
    parts: float = 0.0
    memory: float = 0.96


COSTS = DecodeCosts()
# Of taller tiles, fitted to 109 chunks of prompts of D 64, 128 and 256 on an H200
# (bench/results/h200-chunks.json): in the mean the number of splits that they choose takes 1.016
# of the time of the fastest one that was timed.
TALL = DecodeCosts(
    step=0.195, per_key=0.0052, eight_warps=1.0, busy=0.00465, merge=7.85, per_split=0.0, parts=3.6
)
_SHORT_ROWS = 16
# Registers of a thread of a tall tile, beside its scores, its weights and its outputs.
_REGISTERS = 80


def expected(
    problem: Problem, config: DecodeConfig, device: Device, costs: DecodeCosts = COSTS
) -> Estimate | None:
    """What a decode config is expected to take; None where there is nothing to do."""
    if not problem.q_len or not problem.kv_len or not problem.B:
        return None
    costs = TALL if config.BLOCK_M > _SHORT_ROWS else costs
    structure = problem.structure
    share, imbalance = kept(problem.mask_class if structure.sparsity is not None else "")
    grid = decode_grid(problem, config, device)
    tiles = max(1.0, ceil(problem.kv_len * share / config.BLOCK_N))
    columns = structure.head_dim_qk + structure.head_dim_v
    work = config.BLOCK_N * columns / 256 * max(1.0, 0.6 * config.BLOCK_M / 16)
    per_key = costs.per_key * (costs.eight_warps if config.num_warps >= 8 else 1.0)
    step = costs.step + per_key * work + costs.exposed * (config.num_stages <= 2)
    steps = ceil(tiles / grid.num_splits)
    on_one = ceil(grid.programs / device.num_sms)
    turns = ceil(on_one / _resident(problem, config, device))
    chain = turns * steps * imbalance**0.5 * step
    busy = on_one * steps * costs.busy * work
    read = grid.num_work_tiles * tiles * config.BLOCK_N * columns
    read *= ITEMSIZE[structure.dtype_of("k")] / (bandwidth(device) * costs.memory)
    body = (chain**4 + busy**4 + read**4) ** 0.25
    merge = costs.merge + costs.per_split * grid.num_splits if grid.num_splits > 1 else 0.0
    if grid.num_splits > 1:
        left = grid.programs * config.BLOCK_M * structure.head_dim_v * 4
        merge += costs.parts * 2 * left / bandwidth(device)
    bound = "memory" if read >= max(chain, busy) else "latency" if chain > busy else "products"
    us = costs.launch + body + merge
    return Estimate(us, bound, grid.programs / device.num_sms)  # type: ignore[arg-type]


def other_splits(problem: Problem, config: DecodeConfig, device: Device) -> list[DecodeConfig]:
    """The config with other numbers of splits than fill the SMs once, each with a tile of keys."""
    once = decode_grid(problem, replace(config, num_splits=0), device)
    share, _ = kept(problem.mask_class if problem.structure.sparsity is not None else "")
    most = max(1, ceil(problem.kv_len * share / config.BLOCK_N))
    units = max(1, once.num_work_tiles)
    found = {waves * device.num_sms // units for waves in (1, 2, 3)} | {1, 2, 4, most}
    return [
        replace(config, num_splits=splits)
        for splits in sorted(found)
        if 1 <= splits <= most and splits != once.num_splits
    ]


def _resident(problem: Problem, config: DecodeConfig, device: Device) -> int:
    """Programs that an SM holds, by shared memory and registers; short tiles take all they may."""
    structure = problem.structure
    columns = padded(structure.head_dim_qk) + padded(structure.head_dim_v)
    size = ITEMSIZE[structure.dtype_of("k")]
    taken = (config.num_stages - 1) * config.BLOCK_N * columns * size
    taken += config.BLOCK_M * padded(structure.head_dim_qk) * structure.itemsize
    threads, each = 32 * config.num_warps, device.max_registers
    if config.BLOCK_M > _SHORT_ROWS:
        held = config.BLOCK_M * (config.BLOCK_N * 1.25 + padded(structure.head_dim_v)) / threads
        each = min(each, _REGISTERS + ceil(held))
    by_registers = device.registers // (threads * each)
    return max(1, min(device.shared_memory // max(1, taken), by_registers))
