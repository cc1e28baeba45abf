"""A model of the time of Hopper's prefill: tiles of rows over SMs, each with its keys.

A tile of rows takes a start and a step for each tile of its keys. A step is its two products and
what of its softmax no other consumer's products hide, or the time in which memory gives its keys,
whichever is longer. What SMs have more than others is the tail. With the time that memory takes
for inputs and output it is the root of the sum of squares. `python -m bench.fit_costs` finds the
numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.estimate import L2_BYTES, Estimate, bandwidth, key_tiles, memory_time
from flexattn.kernels.hopper.config import WIDEST, HopperPrefillConfig
from flexattn.problem import Problem
from flexattn.problem.mask_lists import kept


@dataclass(frozen=True, slots=True)
class HopperCosts:
    """Microseconds, fitted to records and short prompts of an H200.

    In the median times are off by 4.1 %, ratios of the configs it chooses among by 1.4 %.

    launch: of a call whose L2 is cold. start: of a tile of rows; cross_start comes on top where
    the end of one overlaps the next, lazy_start with lazy_rescale, which takes the part lazy_gain
    of the softmax. product: of one row, key and column of Q K^T or P V. softmax: of one row and
    key with three consumers; times `two` with two of them, 1 + `score` with a score_mod, `turns`
    where consumers alternate. narrow: factor of a step of fewer than 128 keys at up to 128
    columns, except with three consumers; boxes: of a step with `v_box`. tail: the part of the
    longest tile that ends alone. Two bandwidths: memory, for keys that no
    other SM reads; traffic, for inputs and output. They are fits, and include waits.
    """

    launch: float = 9.27
    start: float = 0.172
    cross_start: float = 0.881
    lazy_start: float = 1.25
    lazy_gain: float = 0.325
    product: float = 2.42e-7
    softmax: float = 3.66e-5
    two: float = 1.5
    score: float = 0.503
    turns: float = 0.78
    narrow: float = 1.14
    boxes: float = 1.23
    tail: float = 0.602
    memory: float = 1.05
    traffic: float = 0.963


COSTS = HopperCosts()


def expected(
    problem: Problem, config: HopperPrefillConfig, device: Device, costs: HopperCosts = COSTS
) -> Estimate | None:
    """The estimate of a config's time.

    None for inputs of eight bits and head dimensions above 256, which nobody fitted.
    """
    structure = problem.structure
    if structure.fp8 or structure.head_dim_qk > WIDEST:
        return None
    if not problem.B or not problem.q_len or not problem.kv_len:
        return None
    rows, keys = config.all_rows, config.BLOCK_N
    columns = structure.head_dim_qk + structure.head_dim_v
    masked = structure.sparsity is not None
    tiles = ceil(problem.q_len / config.BLOCK_M)
    heads = problem.B * problem.Hq // config.heads
    steps, most = key_tiles(problem, rows, keys)
    products = rows * keys * columns * costs.product
    softmax = rows * keys * costs.softmax * (1 + costs.score * (structure.score is not None))
    softmax *= {1: 1.5 * costs.two, 2: costs.two}.get(config.consumers, 1.0)
    softmax *= costs.turns if config.ping_pong else 1.0
    start = costs.start
    if config.lazy_rescale:
        start += costs.lazy_start
        softmax *= 1 - costs.lazy_gain
    computed = products + softmax
    if keys < 128 and columns <= 256 and config.consumers < 3:
        computed *= costs.narrow
    if config.v_box:
        computed *= costs.boxes
    if config.cross_tile_pipeline:
        start += costs.cross_start
    section = _section(problem, config, heads)
    read = _read(problem, config, device, costs, tiles, min(heads, section))
    step = (computed**4 + read**4) ** 0.25
    tile, longest = start + steps * step, start + most * step
    units, slots = heads * tiles, device.num_sms
    if masked:
        # Heads of a section end together; those before it leave no SM idle.
        last = 1 - (ceil(heads / section) - 1) * section / heads
        even = units / slots * tile
        body = max(even + tile / 4, even * (1 - last) + longest * costs.tail, longest)
    elif units < 8 * slots:
        body = ceil(units / slots) * tile
    else:
        body = (units / slots + 0.5) * tile
    traffic = memory_time(problem, device) / costs.traffic
    bound = "products" if products > softmax else "softmax"
    if read > computed or traffic > body:
        bound = "memory"
    elif start > steps * step:
        bound = "latency"
    us = costs.launch + (body**2 + traffic**2) ** 0.5
    return Estimate(us, bound, units / slots)  # type: ignore[arg-type]


def _section(problem: Problem, config: HopperPrefillConfig, heads: int) -> int:
    """Heads whose tiles are handed out together."""
    by_order = {"heads": heads, "sections": config.l2_swizzle, "group": problem.Hq // problem.Hkv}
    return min(heads, max(1, by_order.get(config.order, 1)))


def _read(
    problem: Problem,
    config: HopperPrefillConfig,
    device: Device,
    costs: HopperCosts,
    tiles: int,
    section: int,
) -> float:
    """Microseconds in which memory gives a step's keys; 0 where they stay in the L2 cache."""
    structure = problem.structure
    row = (structure.head_dim_qk + structure.head_dim_v) * structure.itemsize
    heads = problem.B * problem.Hq // config.heads
    active = min(heads, max(section, ceil(device.num_sms / tiles)), device.num_sms)
    share, _ = kept(problem.mask_class if structure.sparsity is not None else "")
    group = max(1, problem.Hq // problem.Hkv // config.heads)
    together = active / (group if section >= group else 1)
    if together * problem.kv_len * share * row <= L2_BYTES:
        return 0.0
    return config.BLOCK_N * row * active / (bandwidth(device) * costs.memory)
