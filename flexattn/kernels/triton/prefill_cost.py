"""What Triton's prefill is expected to take on Hopper: tiles of rows that share SMs, by turns.

Programs that share an SM hide each other's waits. So a call takes what an SM's products and
softmaxes keep it busy, or the turns of its programs, each with a start and a step for each tile of
keys, whichever is longer, and with the time that memory takes for inputs and output the root of
the sum of squares. It is there to be compared with Hopper's template, whose blocks start later and
are faster from then on, and to choose among Triton's own tiles. `python -m bench.fit_costs` finds
the numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.config import padded
from flexattn.kernels.base.estimate import ESTIMATE_MARGIN, Estimate, key_tiles, memory_time
from flexattn.kernels.base.features import loads_by_key, loads_tiles
from flexattn.kernels.triton.config import PrefillConfig
from flexattn.problem import Problem, Structure


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


COSTS = PrefillCosts()
# No short prompt of fewer columns, or of more, was measured; none had more tokens.
_NARROWEST, _WIDEST = 40, 128
_LONGEST = 1024
# Of the tiles that sizes may put first.
_WARPS = 4
# Registers of a thread beside its scores, its weights and its outputs.
_REGISTERS = 26
# Bytes of shared memory that the driver keeps of each block's, and those of a block's barriers.
_RESERVED, _BARRIERS = 1024, 64


def is_modelled(structure: Structure) -> bool:
    """Whether the model was fitted to structures like this one, and its choices raced.

    Other heads, inputs of 8 bits, of two dtypes or at odd addresses, float32, score_mods, dropout,
    and masks that read tensors were not.
    """
    reads = loads_by_key(structure) or loads_tiles(structure)
    if structure.dropout or not structure.layout.aligned:
        return False
    dims = structure.head_dim_qk, structure.head_dim_v
    narrow = min(dims) >= _NARROWEST and max(dims) <= _WIDEST
    plain = structure.itemsize == 2 and not structure.kv_dtype and structure.score is None
    return narrow and plain and not reads


def other_tiles(first: PrefillConfig) -> Iterator[PrefillConfig]:
    """What sizes change of the first config: more tiles, or more of them on an SM at a time."""
    for rows, keys, stages in ((64, 64, 3), (64, 64, 2), (128, 32, 3)):
        yield replace(first, BLOCK_M=rows, BLOCK_N=keys, num_warps=_WARPS, num_stages=stages)


def margin(problem: Problem) -> float:
    """What another tile must be expected to gain: nothing at lengths that were measured."""
    return 1.0 if max(problem.q_len, problem.kv_len) <= _LONGEST else ESTIMATE_MARGIN


def expected(
    problem: Problem, config: PrefillConfig, device: Device, costs: PrefillCosts = COSTS
) -> Estimate | None:
    """What a config is expected to take; None where nobody fitted it, or nothing is to do."""
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
    resident = _resident(structure, config, device)
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


def _resident(structure: Structure, config: PrefillConfig, device: Device) -> int:
    """Programs that an SM holds, by shared memory and registers."""
    queries, values = padded(structure.head_dim_qk), padded(structure.head_dim_v)
    taken = config.num_stages * config.BLOCK_N * (queries + values) + config.BLOCK_M * queries
    threads = 32 * config.num_warps
    held = config.BLOCK_M * (1.5 * config.BLOCK_N + values) / threads
    registers = 8 * ceil(min(device.max_registers, _REGISTERS + held) / 8)
    by_registers = device.registers // (threads * registers)
    by_memory = (device.shared_memory + _RESERVED) // (
        taken * structure.itemsize + _BARRIERS + _RESERVED
    )
    return max(1, min(by_memory, by_registers))
