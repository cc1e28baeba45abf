"""Models of the time of calls of the Triton templates on Hopper: prefill and decode.

Prefill: tiles of rows share SMs, by turns, and programs that share one hide each other's waits. So
a call takes what an SM's products and softmaxes keep it busy, or the turns of its programs, each
with a start and a step for each tile of keys, whichever is longer, and with the time that memory
takes for inputs and output the root of the sum of squares. It is there to be compared with
Hopper's template, whose blocks start later and are faster from then on, and to choose among
Triton's own tiles.

Decode: splits over SMs, each with its keys. A program takes a step for each tile of them;
programs that share an SM overlap theirs. Keys are read once, so memory bounds it from below, and
splits cost a merge.

`python -m bench.fit_costs` finds the numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.config import padded
from flexattn.kernels.base.estimate import (
    ESTIMATE_MARGIN,
    Estimate,
    bandwidth,
    key_tiles,
    memory_time,
)
from flexattn.kernels.base.features import loads_by_key, loads_tiles
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, decode_grid
from flexattn.problem import ITEMSIZE, Problem, Structure
from flexattn.problem.mask_lists import kept


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Microseconds, fitted to 36 records and 88 short prompts of an H200, of 40 to 128 columns.

    In the median times are off by 4.0 %, ratios of the tiles it chooses among by 1.8 %.

    launch: of a call whose L2 is cold. start: of a tile of rows. step: what a tile of keys waits,
    beside its products and its softmax; two_stages: what it waits more with two of them. product:
    of one row, key and column of Q K^T or P V. softmax: of one row and key. traffic: of the
    bandwidth, what inputs and output have; it stands for waits too.
    """

    launch: float = 5.63
    start: float = 1.01
    step: float = 0.283
    two_stages: float = 0.246
    product: float = 3.71e-7
    softmax: float = 3.59e-5
    traffic: float = 0.51


PREFILL_COSTS = PrefillCosts()
# No short prompt of fewer columns, or of more, was measured; none had more tokens.
_NARROWEST, _WIDEST = 40, 128
_LONGEST = 1024
# Of the tiles that sizes may put first.
_WARPS = 4
# Registers of a thread beside its scores, its weights and its outputs.
_PREFILL_REGISTERS = 26
# Bytes of shared memory that the driver keeps of each block's, and those of a block's barriers.
_RESERVED, _BARRIERS = 1024, 64


def is_modelled(structure: Structure) -> bool:
    """True if the model was fitted to structures like this one, and its choices raced.

    Other heads, inputs of 8 bits, of two dtypes or at odd addresses, float32, score_mods, dropout,
    and masks that read tensors were not.
    """
    reads = loads_by_key(structure) or loads_tiles(structure)
    if structure.dropout or not structure.layout.aligned:
        return False
    dims = structure.head_dims
    narrow = min(dims) >= _NARROWEST and max(dims) <= _WIDEST
    plain = structure.itemsize == 2 and not structure.kv_dtype and structure.score is None
    return narrow and plain and not reads


def other_tiles(first: PrefillConfig) -> Iterator[PrefillConfig]:
    """The first config with other tiles: more tiles, or more of them on an SM at a time."""
    for rows, keys, stages in ((64, 64, 3), (64, 64, 2), (128, 32, 3)):
        yield replace(first, BLOCK_M=rows, BLOCK_N=keys, num_warps=_WARPS, num_stages=stages)


def margin(problem: Problem) -> float:
    """The factor by which another tile must be faster; 1.0 at lengths that were measured."""
    return 1.0 if max(problem.q_len, problem.kv_len) <= _LONGEST else ESTIMATE_MARGIN


def expected_prefill(
    problem: Problem, config: PrefillConfig, device: Device, costs: PrefillCosts = PREFILL_COSTS
) -> Estimate | None:
    """The estimate of a config's time; None where nobody fitted it, or nothing is to do."""
    structure = problem.structure
    if not is_modelled(structure):
        return None
    if not problem.B or not problem.q_len or not problem.kv_len:
        return None
    rows, keys = config.BLOCK_M, config.BLOCK_N
    steps, most = key_tiles(problem, rows, keys)
    columns = padded(structure.head_dim_qk) + padded(structure.head_dim_v)
    products, softmax = costs.product * columns * rows * keys, costs.softmax * rows * keys
    tiles = problem.B * problem.Hq * ceil(problem.q_len / rows)
    on_one = tiles / device.num_sms
    resident = _prefill_resident(structure, config, device)
    turns = max(1.0, ceil(on_one) / resident)
    if structure.sparsity is None:  # all end together; else what ends early makes room
        turns = ceil(turns)
    waits = costs.step + (costs.two_stages if config.num_stages < 3 else 0.0)
    step = waits + products + softmax
    chain = max(turns * (costs.start + steps * step), costs.start + most * step)
    busy = (ceil(on_one) if on_one < 8 else on_one + 0.5) * steps * (products + softmax)
    bound = "latency" if chain > busy else "products" if products > softmax else "softmax"
    traffic = memory_time(problem, device) / costs.traffic
    bound = "memory" if traffic > max(chain, busy) else bound
    us = costs.launch + ((chain**4 + busy**4) ** 0.5 + traffic**2) ** 0.5
    return Estimate(us, bound, on_one / resident)  # type: ignore[arg-type]


def _prefill_resident(structure: Structure, config: PrefillConfig, device: Device) -> int:
    """Programs that an SM holds, by shared memory and registers."""
    queries, values = padded(structure.head_dim_qk), padded(structure.head_dim_v)
    taken = config.num_stages * config.BLOCK_N * (queries + values) + config.BLOCK_M * queries
    threads = 32 * config.num_warps
    held = config.BLOCK_M * (1.5 * config.BLOCK_N + values) / threads
    registers = 8 * ceil(min(device.max_registers, _PREFILL_REGISTERS + held) / 8)
    by_registers = device.registers // (threads * registers)
    by_memory = (device.shared_memory + _RESERVED) // (
        taken * structure.itemsize + _BARRIERS + _RESERVED
    )
    return max(1, min(by_memory, by_registers))


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


DECODE_COSTS = DecodeCosts()
# Of taller tiles, fitted to 109 chunks of prompts of D 64, 128 and 256 on an H200
# (bench/results/h200-chunks.json): in the mean the number of splits that they choose takes 1.016
# of the time of the fastest one that was timed.
TALL = DecodeCosts(
    step=0.195, per_key=0.0052, eight_warps=1.0, busy=0.00465, merge=7.85, per_split=0.0, parts=3.6
)
_SHORT_ROWS = 16
# Registers of a thread of a tall tile, beside its scores, its weights and its outputs.
_TALL_REGISTERS = 80


def expected_decode(
    problem: Problem, config: DecodeConfig, device: Device, costs: DecodeCosts = DECODE_COSTS
) -> Estimate | None:
    """The estimate of a decode config's time; None where there is nothing to do."""
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
    turns = ceil(on_one / _decode_resident(problem, config, device))
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


def _decode_resident(problem: Problem, config: DecodeConfig, device: Device) -> int:
    """Programs that an SM holds, by shared memory and registers; short tiles take all they may."""
    structure = problem.structure
    columns = padded(structure.head_dim_qk) + padded(structure.head_dim_v)
    size = ITEMSIZE[structure.dtype_of("k")]
    taken = (config.num_stages - 1) * config.BLOCK_N * columns * size
    taken += config.BLOCK_M * padded(structure.head_dim_qk) * structure.itemsize
    threads, each = 32 * config.num_warps, device.max_registers
    if config.BLOCK_M > _SHORT_ROWS:
        held = config.BLOCK_M * (config.BLOCK_N * 1.25 + padded(structure.head_dim_v)) / threads
        each = min(each, _TALL_REGISTERS + ceil(held))
    by_registers = device.registers // (threads * each)
    return max(1, min(device.shared_memory // max(1, taken), by_registers))
