"""Triton's defaults by sizes on Hopper: tiles of short prompts, and numbers of splits of a decode.

Each rule was read from times of an H200: 88 short prompts (bench/results/h200-short-prompts.json),
109 chunks of prompts (h200-chunks.json), and the shipped records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from flexattn.device import Device
from flexattn.kernels.base.features import loads_by_key, loads_tiles
from flexattn.kernels.base.sizes import key_steps, waves
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, decode_grid
from flexattn.problem import Problem, Structure
from flexattn.problem.mask_lists import kept

# No short prompt of fewer columns, or of more, was measured; none had more tokens.
_NARROWEST, _WIDEST, _LONGEST = 40, 128, 1024
# Tiles of keys for each SM, of one tile of rows and of all, up to which this template is faster
# than Hopper's: with a mask and 64 columns its blocks end early, and share keys of a group.
_MOST_STEPS, _FEW, _MORE, _OF_GROUPS = 6, 5, 10, 40
# Rows of a short tile of a decode, and tiles of keys that are worth a merge.
_SHORT_ROWS, _MANY_KEYS = 16, 64


def was_raced(structure: Structure) -> bool:
    """True if short prompts of structures like this one were timed with both templates.

    Other heads, inputs of 8 bits, of two dtypes or at odd addresses, float32, score_mods, dropout,
    and masks that read tensors were not.
    """
    if structure.dropout or not structure.layout.aligned:
        return False
    dims = structure.head_dims
    narrow = min(dims) >= _NARROWEST and max(dims) <= _WIDEST
    plain = structure.itemsize == 2 and not structure.kv_dtype and structure.score is None
    return narrow and plain and not (loads_by_key(structure) or loads_tiles(structure))


def other_tiles(first: PrefillConfig) -> Iterator[PrefillConfig]:
    """The first config with other tiles: more tiles, or more of them on an SM at a time."""
    for rows, keys, stages in ((64, 64, 3), (64, 64, 2), (128, 32, 3)):
        yield replace(first, BLOCK_M=rows, BLOCK_N=keys, num_warps=4, num_stages=stages)


def of_short_prompt(
    problem: Problem, first: PrefillConfig, device: Device
) -> PrefillConfig | None:
    """The config of a prompt of up to 1,024 tokens; None of others, which keep the first."""
    if not was_raced(problem.structure) or max(problem.q_len, problem.kv_len) > _LONGEST:
        return None
    deep, flat, tall = other_tiles(first)
    tiles = waves(problem, device)
    if tiles <= 1 and first.BLOCK_M == 64 and problem.q_len > 64:
        return first
    wide = first.BLOCK_M == 64 or max(problem.structure.head_dims) == _WIDEST
    if problem.structure.sparsity is None and tiles > 1 and (tiles < 2 or not wide):
        return tall
    return flat if tiles >= 3 and first.BLOCK_M == 64 else deep


def beats_hopper(problem: Problem, device: Device) -> bool:
    """True if a prompt is so short that Hopper's blocks, which start later, end later."""
    structure, steps = problem.structure, key_steps(problem)
    longest = max(problem.q_len, problem.kv_len)
    if not was_raced(structure) or longest > _LONGEST or steps > _MOST_STEPS:
        return False
    most = _FEW
    if structure.sparsity is not None and max(structure.head_dims) <= 64:
        most = _OF_GROUPS if problem.Hq > problem.Hkv else _MORE
    return waves(problem, device) * steps <= most


def best_splits(problem: Problem, config: DecodeConfig, device: Device) -> int:
    """The number of splits that is faster than those that fill the SMs once; 0 where these are.

    With a window there are few tiles of keys to split. An SM holds three tall tiles of 64 columns,
    or two of up to 128; the latter have twice as many splits if fewer SMs are idle then. Two short
    tiles share an SM if many SMs would be idle otherwise.
    """
    structure, sms = problem.structure, device.num_sms
    widest, tall = max(structure.head_dims), config.BLOCK_M > _SHORT_ROWS
    share = kept(problem.mask_class).share if structure.sparsity is not None else 1.0
    tiles = max(1, ceil(problem.kv_len * share / config.BLOCK_N))
    grid = decode_grid(problem, replace(config, num_splits=0), device)
    units = max(1, grid.num_work_tiles)
    wanted, few = max(1, sms // units), units < 0.9 * sms and widest <= 128
    if tall and (few or widest <= 64):
        held = (3 if widest <= 64 else 2) * sms
        wanted, twice = max(1, held // units), 2 * held // units
        wanted = twice if widest > 64 and twice > 2.1 * wanted else wanted
    elif wanted == 1 and few and tiles >= _MANY_KEYS:
        wanted = 2 * sms // units
    # What a window leaves of two tiles is not worth a merge.
    wanted = min(wanted, tiles if share == 1.0 else max(1, tiles // 2))
    return 0 if wanted == grid.num_splits else wanted
