"""Sizes by which static defaults differ: tiles of rows for each SM, and tiles of keys of a row."""

from __future__ import annotations

from math import ceil

from flexattn.device import Device
from flexattn.problem import Problem
from flexattn.problem.mask_lists import kept

# Of an H200's 50 MiB of L2, what the keys and values of the heads at work may fill.
L2_BYTES = 32 * 2**20
# Rows and keys of the tiles that are counted here.
_TILE = 128


def waves(problem: Problem, device: Device, rows: int = _TILE) -> float:
    """Tiles of so many rows of all heads, over the device's SMs."""
    return problem.B * problem.Hq * ceil(problem.q_len / rows) / device.num_sms


def key_steps(problem: Problem) -> float:
    """Tiles of 128 keys that a tile of 128 rows visits in the mean; an edge cuts tiles in two."""
    if problem.structure.sparsity is None:
        return ceil(problem.kv_len / _TILE)
    return max(1.0, problem.kv_len * kept(problem.mask_class).share / _TILE) + 0.5
