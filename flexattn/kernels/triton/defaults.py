"""Configs of the Triton templates: static defaults, also by sizes, the invariant one, axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import TypeAlias

from flexattn.device import Device, is_rdna
from flexattn.errors import ConfigError
from flexattn.kernels.base import features
from flexattn.kernels.base.amd import as_kind
from flexattn.kernels.base.config import orders, power_above, turned
from flexattn.kernels.base.sizes import key_steps, waves
from flexattn.kernels.triton.config import (
    ORDERS,
    AmdDecodeConfig,
    AmdPrefillConfig,
    DecodeConfig,
    PrefillConfig,
    TritonOrder,
    decode_grid,
    fit_to_mask,
)
from flexattn.kernels.triton.limits import LIMITS
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import DENSE, INDEX_RANGES, Problem, Structure
from flexattn.problem.mask_lists import kept

# On sm_90, beyond so many values by key the loops of 64 x 64 spill, and beyond twice that all but
# the smallest.
MANY_BY_KEY = 8


def prefill_rules(problem: Problem, device: Device) -> Iterator[PrefillConfig]:
    """Prefill configs by head dimensions and mods alone, best first; not all of them can run."""
    structure = problem.structure
    order = _order(structure)
    for each in _prefill(structure, device):
        yield fit_to_mask(_own(replace(each, order=order), device), structure)


def decode_rules(problem: Problem, device: Device) -> Iterator[DecodeConfig]:
    """Decode configs by head dimensions, rows and shared memory alone, best first.

    q_len decides between two heights of tiles. Splits fill the SMs once.
    """
    structure = problem.structure
    for each in _decode(problem, max(structure.head_dims), device):
        if device.backend == "hip":
            # Buffer instructions take 2 to 20 registers from CDNA's; with them RDNA's spill.
            near = structure.itemsize == 2 and not is_rdna(device)
            each = replace(as_kind(each, AmdDecodeConfig), buffer_loads=near)
        yield fit_to_mask(each, structure)


def _own(config: PrefillConfig, device: Device) -> PrefillConfig:
    return as_kind(config, AmdPrefillConfig) if device.backend == "hip" else config


def _prefill(structure: Structure, device: Device) -> Iterator[PrefillConfig]:
    widest = max(structure.head_dims)
    products = features.fp32_products(structure)
    if products == "bf16x6":
        yield from of_parts(widest, device)
    elif products:
        # Without matrix instructions the tile lives in registers: small tiles.
        shapes = ((64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 1))
        # What is converted lies there twice: loops of larger tiles spilled.
        small = 0 if not structure.kv_dtype else 2 if widest <= 64 else 3
        yield from (PrefillConfig(*shape) for shape in shapes[small:])
    else:
        yield from _by_instructions(structure, device, widest)
    yield from (PrefillConfig(16, 16, 4, 1), PrefillConfig(16, 16, 8, 1))


def _by_instructions(structure: Structure, device: Device, widest: int) -> Iterator[PrefillConfig]:
    """The tiles of matrix instructions, best first."""
    if device.has_wgmma and (widest <= 128 or features.values_by_key(structure) > MANY_BY_KEY):
        yield from _gathering(structure, widest)
    if device.has_wgmma and widest <= 128 and structure.kv_dtype:
        # What is converted passes through registers: of four warps the loop spilled.
        yield from (PrefillConfig(128, 64, 8, 3, True), PrefillConfig(128, 64, 8, 2))
    table = _PREFILL.get(device.arch, _PREFILL["small"])
    if device.has_tensor_memory:
        table = _PREFILL["sm_100"]
    if device.backend == "hip":
        table = _PREFILL["rdna" if is_rdna(device) else "hip"]
    yield from next((found for limit, found in table.items() if widest <= limit), ())
    yield from (PrefillConfig(64, 32, 8, 1), PrefillConfig(32, 32, 8, 1))
    yield PrefillConfig(32, 16, 4, 1)


def of_parts(widest: int, device: Device) -> tuple[PrefillConfig, ...]:
    """Tiles of float32 that is multiplied as parts of bfloat16, best first."""
    table = _PARTS["sm_90" if device.has_wgmma else "small"]
    return next(found for limit, found in table.items() if widest <= limit)


def _order(structure: Structure) -> TritonOrder:
    """Tiles of all heads side by side where a mask makes some longer: 2 to 15 % off on an H200.

    Those of a window are as long as each other: head after head they find keys in the L2 cache,
    which takes 1 % off. Without a mask nothing changes.
    """
    if structure.sparsity is None:
        return "last"
    if structure.sparsity.runs and structure.mask is not None:
        span = mask_form(structure.mask.mod.expr, INDEX_RANGES).span
        if span.low is not None and span.high is not None:
            return "last" if span.rest is None else "heads"
    return "heads"


def _gathering(structure: Structure, widest: int) -> Iterator[PrefillConfig]:
    """For a mod that waits for what it reads, and holds it: many small tiles hide that best."""
    values = features.values_by_key(structure)
    if values > 2 * MANY_BY_KEY:
        yield PrefillConfig(16, 16, 8, 1)
    elif values > MANY_BY_KEY:
        yield PrefillConfig(64, 32, 8, 2)
    elif features.loads_tiles(structure):
        yield PrefillConfig(64, 64, 4, 2, True)
    elif features.loads_by_key(structure) and not (
        widest > 64 and features.compares_numbers(structure)
    ):
        tall = widest <= 64 and values <= features.FEW_BY_KEY
        yield PrefillConfig(128 if tall else 64, 64, 4, 3, True)


def _cdna(rows: int, keys: int, warps: int) -> PrefillConfig:
    """A tile of CDNA, whose hints take 4 to 38 registers from it on gfx942 (Triton 3.9)."""
    return AmdPrefillConfig(rows, keys, warps, 1, matrix_instr_nonkdim=16, buffer_loads=True)


def _rdna(rows: int, keys: int, warps: int) -> PrefillConfig:
    """A tile of RDNA, from which buffer instructions take up to 13 registers on gfx1201."""
    return AmdPrefillConfig(rows, keys, warps, 1, buffer_loads=True)


# Widest head dimension, then configs by preference: measured on an H200; elsewhere chosen to
# fit 227 or 99 KiB of shared memory, the LDS of CDNA, or RDNA's registers, without spills.
_Table: TypeAlias = dict[int, tuple[PrefillConfig, ...]]
_PARTS: dict[str, _Table] = {
    "sm_90": {
        64: (PrefillConfig(64, 32, 4, 2), PrefillConfig(64, 16, 4, 2)),
        128: (PrefillConfig(128, 32, 8, 2), PrefillConfig(64, 32, 4, 2)),
    },
    "small": {
        64: (PrefillConfig(64, 32, 4, 2), PrefillConfig(32, 32, 4, 2)),
        128: (PrefillConfig(16, 32, 4, 2), PrefillConfig(32, 16, 4, 2)),
    },
}
_PREFILL: dict[str, _Table] = {
    "sm_90": {
        64: (PrefillConfig(64, 128, 4, 3, True), PrefillConfig(128, 64, 4, 3)),
        128: (
            PrefillConfig(128, 64, 4, 2, True),
            PrefillConfig(128, 128, 8, 3, True),
            PrefillConfig(128, 128, 8, 2),
            PrefillConfig(128, 64, 8, 2),
        ),
        256: (PrefillConfig(128, 64, 8, 2, True), PrefillConfig(128, 64, 8, 2)),
        576: (PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 32, 8, 1)),
    },
    "sm_100": {
        64: (PrefillConfig(128, 128, 8, 3, True), PrefillConfig(64, 64, 4, 2)),
        128: (PrefillConfig(128, 64, 8, 3, True), PrefillConfig(64, 64, 4, 2)),
        256: (
            PrefillConfig(128, 64, 8, 2, True),
            PrefillConfig(128, 32, 8, 2, True),
            PrefillConfig(64, 32, 8, 2),
        ),
        576: (PrefillConfig(32, 16, 8, 1),),
    },
    "small": {
        64: (PrefillConfig(128, 64, 4, 3),),
        128: (PrefillConfig(64, 64, 4, 2), PrefillConfig(128, 32, 8, 2)),
        256: (PrefillConfig(64, 32, 8, 2), PrefillConfig(32, 32, 4, 2)),
        576: (PrefillConfig(32, 16, 8, 1),),
    },
    "hip": {
        64: (_cdna(128, 64, 4),),
        128: (_cdna(128, 64, 8), _cdna(64, 32, 4)),
        256: (_cdna(64, 32, 4),),
        576: (PrefillConfig(32, 16, 4, 1),),
    },
    "rdna": {
        64: (PrefillConfig(64, 32, 4, 1), PrefillConfig(32, 32, 2, 1)),
        128: (_rdna(64, 16, 4), _rdna(32, 16, 2)),
        256: (_rdna(32, 16, 8), _rdna(16, 16, 4)),
        576: (PrefillConfig(16, 16, 8, 1),),
    },
}


def _decode(problem: Problem, widest: int, device: Device) -> Iterator[DecodeConfig]:
    rows = problem.q_len * problem.structure.packed_heads
    heights = (16,) if rows <= 16 else (64, 32, 16)
    if is_rdna(device):
        yield from _rdna_decode(heights, widest)
        return
    wide = device.shared_memory > 160 * 1024 and problem.structure.dtype != "float32"
    for height in heights:
        warps = 8 if height * widest >= 64 * 256 else 4
        if wide:
            width = 128 if widest <= 128 else 64
            yield DecodeConfig(height, width if height == 16 else 64, warps, 3)
        if wide and widest > 256:
            # Latent keys of 576 columns: with one tile under way SMs wait, 12 to 31 % on an H200.
            yield from (DecodeConfig(height, 32, each, 3) for each in (warps, 8))
        if widest <= 128:
            yield DecodeConfig(height, 64, warps, 2)
        yield from (DecodeConfig(height, 32, warps, 2), DecodeConfig(height, 32, 8, 2))
        yield DecodeConfig(height, 16, warps, 1)
        yield DecodeConfig(height, 16, 8, 1)


def _rdna_decode(heights: Sequence[int], widest: int) -> Iterator[DecodeConfig]:
    """Without a tile of keys on its way: a second stage takes registers that a wave has not."""
    for height in heights:
        warps = 2 if height == 32 else 4
        if widest <= 64:
            yield DecodeConfig(height, 64 if height == 16 else 32, warps, 1)
        if widest <= 128 and height == 16:
            yield DecodeConfig(height, 32, warps, 1)
        yield DecodeConfig(height, 16, warps, 1)
    yield DecodeConfig(16, 16, 8, 1)


def invariant_config(problem: Problem, device: Device) -> PrefillConfig:
    """The config of every call of these dtypes and head dimensions, cut to the mask's blocks.

    Without splits each row walks its keys in their order, from tiles that begin at fixed
    positions: of decoding a program for each head. Raises ConfigError where nothing can run.
    """
    wanted = problem.structure
    # Mods, statistics and how tensors lie choose no other tile.
    plain = replace(
        wanted, score=None, mask=None, sparsity=None, layout=DENSE, lse=False, max_scores=False,
        sinks="", rules_off=(), tanh="auto", dropout=False,
    )  # fmt: skip
    for each in _tiles(wanted, device):
        config = _own(each, device)
        if not LIMITS.violated(config, plain, device):
            config = fit_to_mask(config, wanted)
            broken = LIMITS.reasons(config, wanted, device)
            if not broken:
                return config
            raise _none(problem, "; ".join(broken))
    raise _none(problem, "no tile of these head dimensions can run")


def _tiles(structure: Structure, device: Device) -> Iterator[PrefillConfig]:
    widest = max(structure.head_dims)
    products = features.fp32_products(structure)
    if products == "bf16x6":
        yield from of_parts(widest, device)
    elif products:
        yield PrefillConfig(64, 32, 8, 2)
    elif device.backend == "hip":
        yield PrefillConfig(32, 16, 2, 1) if is_rdna(device) else PrefillConfig(64, 32, 4, 1)
    elif widest <= 128:
        yield PrefillConfig(128, 64, 8, 2) if device.has_wgmma else PrefillConfig(64, 64, 4, 2)
    elif widest <= 256:
        yield PrefillConfig(128, 64, 8, 2) if device.has_wgmma else PrefillConfig(64, 32, 4, 2)
    else:
        yield PrefillConfig(64, 32, 8, 1)
    yield from (PrefillConfig(32, 32, 8, 1), PrefillConfig(32, 16, 4, 1))
    yield PrefillConfig(16, 16, 4, 1)


def _none(problem: Problem, why: str) -> ConfigError:
    return ConfigError(
        f"BATCH_INVARIANT for {problem.describe()}",
        why,
        "compute it without, or with smaller head dimensions",
    )


# By sizes on Hopper: tiles of short prompts, and numbers of splits of a decode. Each rule was read
# from times of an H200: 88 short prompts (bench/results/h200-short-prompts.json), 109 chunks of
# prompts (h200-chunks.json), and the shipped records.
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
    return (
        narrow
        and plain
        and not (features.loads_by_key(structure) or features.loads_tiles(structure))
    )


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


# Waves of programs on the SMs that a split of the keys makes; one wave is what 0 splits mean.
WAVES = (0.5, 1.5, 2, 3)
MORE_WAVES = (0.25, 0.5, 0.75, 1.5, 2, 3, 4)


def split_counts(problem: Problem, config: DecodeConfig, device: Device, every: bool) -> list[int]:
    """Numbers of splits that differ from each other and leave none without a tile of keys.

    0, which fills the SMs once at any length, and fractions and multiples of that at this one.
    """
    once = decode_grid(problem, replace(config, num_splits=0), device)
    units = max(1, once.num_work_tiles)
    key_tiles = max(1, -(-problem.kv_len // config.BLOCK_N))
    found = {int(waves * device.num_sms / units) for waves in (MORE_WAVES if every else WAVES)}
    found |= {1} if every else set()
    allowed = {splits for splits in found if 1 <= splits <= key_tiles}
    return [0, *sorted(allowed - {once.num_splits})]


def _published(structure: Structure) -> list[tuple[int, ...]]:
    """The tiles of CDNA that AITER and Inductor publish beside those of the axes."""
    if structure.dropout:
        return [(32, 32, 2, 1)]
    if max(structure.head_dims) <= 64:
        return [(256, 64, 8, 1)]
    if max(structure.head_dims) > 128:
        return [(32, 32, 8, 1), (32, 64, 4, 2), (32, 64, 8, 2)]
    return []


def prefill_axes(problem: Problem, device: Device, every: bool) -> Iterator[PrefillConfig]:
    """Every combination for prefill, with tiles cut to the mask's blocks; some cannot run."""
    structure = problem.structure
    # One stage loads nothing ahead, and on NVIDIA spills where two do not.
    depths = (1, 2) if device.backend == "hip" else (2, 3)
    axes: tuple[tuple[int, ...], ...] = ((64, 128), (32, 64, 128), (4, 8), depths)
    if every:
        axes = ((64, 128, 256), (32, 64, 128), (4, 8), (*depths, depths[-1] + 1))
    if is_rdna(device) or (every and device.backend == "hip"):
        # A wave of RDNA has half the registers of CDNA's.
        tall = (256,) if every else ()
        axes = ((32, 64, 128, *tall), (16, 32, 64, 128), (2, 4, 8), axes[-1])
    tma = (False, True) if device.has_tma else (False,)
    tiles = [*product(*axes)]
    if device.backend == "hip" and not every and not is_rdna(device):
        tiles += _published(structure)
    for (rows, width, warps, stages), use_tma in product(tiles, tma):
        tile = fit_to_mask(PrefillConfig(rows, width, warps, stages, use_tma), structure)
        for order in orders(ORDERS, problem, tile.BLOCK_M, every):
            yield from turned(replace(tile, order=order), structure)


def decode_axes(
    problem: Problem, device: Device, every: bool, height: int
) -> Iterator[DecodeConfig]:
    """The same for decode. height: of the static default's tiles, the only one without `every`."""
    structure = problem.structure
    # Two warps would hold all keys of a tile in too few registers.
    axes: tuple[tuple[int, ...], ...] = ((height,), (32, 64, 128), (4, 8), (2, 3, 4))
    if every:
        highest = power_above(problem.q_len * structure.packed_heads)
        heights = tuple(height for height in (16, 32, 64, 128) if height <= highest)
        axes = (heights, (16, 32, 64, 128, 256), (4, 8), (2, 3, 4))
    if is_rdna(device) or (every and device.backend == "hip"):
        # Eight warps on 16 rows spill on RDNA.
        groups = (2, 4) if is_rdna(device) else (2, 4, 8)
        axes = (axes[0], (16, 32, 64, 128), groups, (1, 2, 3))
    for rows, width, warps, stages in product(*axes):
        tile = fit_to_mask(DecodeConfig(rows, width, warps, stages), structure)
        for splits in split_counts(problem, tile, device, every):
            yield from turned(replace(tile, num_splits=splits), structure)
