"""Where to start with the Triton templates, and what to fall back to, with nothing tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from flexattn.device import Device, is_rdna
from flexattn.kernels.base import features
from flexattn.kernels.base.estimate import best_first
from flexattn.kernels.triton import prefill_cost
from flexattn.kernels.triton.amd import for_device
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig, TritonOrder
from flexattn.kernels.triton.cost import expected, other_splits
from flexattn.kernels.triton.tiles import fit_to_mask
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Problem, Structure

# On sm_90, beyond so many values by key the loops of 64 x 64 spill, and beyond twice that all but
# the smallest.
MANY_BY_KEY = 8


def prefill_defaults(
    problem: Problem, device: Device, can_run: Callable[[PrefillConfig], bool]
) -> Iterator[PrefillConfig]:
    """Prefill configs, best first; not all of them can run.

    On Hopper another tile comes first where it is expected to be faster: of short prompts, to
    which the model was fitted in each tile, by however little.
    """
    rules = list(prefill_rules(problem, device))
    first = next(filter(can_run, rules), None)
    others = () if first is None or not device.has_wgmma else prefill_cost.other_tiles(first)
    yield from best_first(
        rules, others, lambda config: prefill_cost.expected(problem, config, device), can_run,
        margin=prefill_cost.margin(problem),
    )  # fmt: skip


def prefill_rules(problem: Problem, device: Device) -> Iterator[PrefillConfig]:
    """The same by head dimensions and mods alone."""
    structure = problem.structure
    order = _order(structure)
    for each in _prefill(structure, device):
        config = for_device(replace(each, order=order), device)
        yield fit_to_mask(config, structure)


def decode_defaults(
    problem: Problem, device: Device, can_run: Callable[[DecodeConfig], bool]
) -> Iterator[DecodeConfig]:
    """Decode configs, best first; q_len decides between two heights of tiles.

    Where the model of an H200 expects another number of splits to gain, it is the first one's:
    kernels do not depend on it.
    """
    rules = list(decode_rules(problem, device))
    first = next(filter(can_run, rules), None)
    fitted = first is not None and device.has_wgmma
    others = other_splits(problem, first, device) if first is not None and fitted else ()
    yield from best_first(rules, others, lambda config: expected(problem, config, device), can_run)


def decode_rules(problem: Problem, device: Device) -> Iterator[DecodeConfig]:
    """The same by head dimensions, rows and shared memory alone; splits fill the SMs once."""
    structure = problem.structure
    for each in _decode(problem, max(structure.head_dim_qk, structure.head_dim_v), device):
        yield fit_to_mask(for_device(each, device), structure)


def _prefill(structure: Structure, device: Device) -> Iterator[PrefillConfig]:
    widest = max(structure.head_dim_qk, structure.head_dim_v)
    products = features.fp32_products(structure)
    if products == "bf16x6":
        yield from of_parts(widest, device)
        yield from (PrefillConfig(16, 16, 4, 1), PrefillConfig(16, 16, 8, 1))
        return
    if products:
        # Without matrix instructions the tile lives in registers: small tiles.
        shapes = ((64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 1))
        # What is converted lies there twice: loops of larger tiles spilled.
        small = 0 if not structure.kv_dtype else 2 if widest <= 64 else 3
        yield from (PrefillConfig(*shape) for shape in shapes[small:])
        yield from (PrefillConfig(16, 16, 4, 1), PrefillConfig(16, 16, 8, 1))
        return
    if device.has_wgmma and (widest <= 128 or features.values_by_key(structure) > MANY_BY_KEY):
        yield from _gathering(structure, widest)
    if device.has_wgmma and widest <= 128 and structure.kv_dtype:
        # What is converted passes through registers: of four warps the loop spilled.
        yield from (PrefillConfig(128, 64, 8, 3, True), PrefillConfig(128, 64, 8, 2))
    table = _PREFILL.get(device.arch, _PREFILL["small"])
    if device.backend == "hip":
        table = _PREFILL["rdna" if is_rdna(device) else "hip"]
    for limit, configs in table:
        if widest <= limit:
            yield from configs
            break
    yield from (PrefillConfig(64, 32, 8, 1), PrefillConfig(32, 32, 8, 1))
    yield from (PrefillConfig(32, 16, 4, 1), PrefillConfig(16, 16, 4, 1))
    yield PrefillConfig(16, 16, 8, 1)


def of_parts(widest: int, device: Device) -> tuple[PrefillConfig, ...]:
    """Tiles of float32 that is multiplied as parts of bfloat16, best first."""
    table = _PARTS["sm_90" if device.has_wgmma else "small"]
    return next(configs for limit, configs in table if widest <= limit)


@lru_cache(maxsize=256)
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


# Widest head dimension, then configs by preference: measured on an H200; elsewhere chosen to
# fit 99 KiB of shared memory, the LDS of CDNA, or RDNA's registers, without spills.
_Table: TypeAlias = tuple[tuple[int, tuple[PrefillConfig, ...]], ...]
_PARTS: dict[str, _Table] = {
    "sm_90": (
        (64, (PrefillConfig(64, 32, 4, 2), PrefillConfig(64, 16, 4, 2))),
        (128, (PrefillConfig(128, 32, 8, 2), PrefillConfig(64, 32, 4, 2))),
    ),
    "small": (
        (64, (PrefillConfig(64, 32, 4, 2), PrefillConfig(32, 32, 4, 2))),
        (128, (PrefillConfig(16, 32, 4, 2), PrefillConfig(32, 16, 4, 2))),
    ),
}
_PREFILL: dict[str, _Table] = {
    "sm_90": (
        (64, (PrefillConfig(64, 128, 4, 3, True), PrefillConfig(128, 64, 4, 3))),
        (
            128,
            (
                PrefillConfig(128, 64, 4, 2, True),
                PrefillConfig(128, 128, 8, 3, True),
                PrefillConfig(128, 128, 8, 2),
                PrefillConfig(128, 64, 8, 2),
            ),
        ),
        (256, (PrefillConfig(128, 64, 8, 2, True), PrefillConfig(128, 64, 8, 2))),
        (576, (PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 32, 8, 1))),
    ),
    "small": (
        (64, (PrefillConfig(128, 64, 4, 3),)),
        (128, (PrefillConfig(64, 64, 4, 2), PrefillConfig(128, 32, 8, 2))),
        (256, (PrefillConfig(64, 32, 8, 2), PrefillConfig(32, 32, 4, 2))),
        (576, (PrefillConfig(32, 16, 8, 1),)),
    ),
    "hip": (
        (64, (PrefillConfig(128, 64, 4, 1),)),
        (128, (PrefillConfig(128, 64, 8, 1), PrefillConfig(64, 32, 4, 1))),
        (256, (PrefillConfig(64, 32, 4, 1),)),
        (576, (PrefillConfig(32, 16, 4, 1),)),
    ),
    "rdna": (
        (64, (PrefillConfig(64, 32, 4, 1), PrefillConfig(32, 32, 2, 1))),
        (128, (PrefillConfig(64, 16, 4, 1), PrefillConfig(32, 16, 2, 1))),
        (256, (PrefillConfig(32, 16, 8, 1), PrefillConfig(16, 16, 4, 1))),
        (576, (PrefillConfig(16, 16, 8, 1),)),
    ),
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
