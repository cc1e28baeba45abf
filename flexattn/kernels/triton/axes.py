"""What a search may vary for a problem, an axis each, by effort."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from flexattn.device import Device, is_rdna
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.knobs import turned
from flexattn.kernels.triton.amd import for_device
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, TritonConfigT, TritonOrder
from flexattn.kernels.triton.tiles import decode_grid, fit_to_mask
from flexattn.problem import Problem

# Waves of programs on the SMs that a split of the keys makes; one wave is what 0 splits mean.
WAVES = (0.5, 1.5, 2, 3)
MORE_WAVES = (0.25, 0.5, 0.75, 1.5, 2, 3, 4)
# By whether it is RDNA, and whether all is tried: waves that share a SIMD's registers, and rows of
# a matrix instruction; 0 leaves either to the compiler. RDNA has instructions of 16 rows alone.
_HINTS: dict[tuple[bool, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    (False, False): ((0, 2), (0, 16)),
    (False, True): ((0, 1, 2, 3), (0, 16, 32)),
    (True, False): ((0,), (0,)),
    (True, True): ((0, 2, 4), (0,)),
}


def prefill_axes(problem: Problem, device: Device, every: bool) -> Iterator[PrefillConfig]:
    """Every combination for prefill, with tiles cut to the mask's blocks; some cannot run."""
    yield from _hinted(_prefill_grid(problem, device, every), device, every)


def decode_axes(
    problem: Problem, device: Device, every: bool, height: int
) -> Iterator[DecodeConfig]:
    """The same for decode. height: of the static default's tiles, the only one but for `every`."""
    yield from _hinted(_decode_grid(problem, device, every, height), device, every)


def orders(problem: Problem, config: PrefillConfig, every: bool) -> tuple[TritonOrder, ...]:
    """The orders of tiles that differ in what they do to this problem.

    Heads side by side pay where they share keys, or where a mask makes some tiles long.
    """
    if problem.q_len <= config.BLOCK_M or problem.Hq == 1:
        return ("last",)
    masked = problem.structure.sparsity is not None
    worth: dict[TritonOrder, bool] = {
        "last": True,
        "first": every and masked,
        "group": problem.Hq > problem.Hkv,
        "heads": every or masked,
    }
    return tuple(order for order, tried in worth.items() if tried)


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


def _hinted(
    configs: Iterator[TritonConfigT], device: Device, every: bool
) -> Iterator[TritonConfigT]:
    """Each config with what AMD's compiler may be told besides; as it is for another's."""
    if device.backend != "hip":
        yield from configs
        return
    waves, rows = _HINTS[is_rdna(device), every]
    for config, wave, row in product(configs, waves, rows):
        hints: dict[str, Any] = {"waves_per_eu": wave, "matrix_instr_nonkdim": row}
        yield replace(for_device(config, device), **hints)


def _prefill_grid(problem: Problem, device: Device, every: bool) -> Iterator[PrefillConfig]:
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
    for (rows, width, warps, stages), use_tma in product(product(*axes), tma):
        tile = fit_to_mask(PrefillConfig(rows, width, warps, stages, use_tma), structure)
        for order in orders(problem, tile, every):
            yield from turned(replace(tile, order=order), structure)


def _decode_grid(
    problem: Problem, device: Device, every: bool, height: int
) -> Iterator[DecodeConfig]:
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
