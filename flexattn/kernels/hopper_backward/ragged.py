"""Packed sequences in Hopper's backward: which tiles of rows and keys they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, dense_stride_arguments, several
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, make_source
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig
from flexattn.kernels.hopper_backward.masks import band_of
from flexattn.kernels.printers.spelling import signature_type
from flexattn.problem import Structure

# See templates/hopper_backward/key_tiles.py.jinja.
KEY_TILES, ROW_TILES = Argument("KEY_TILES", "*i32", 16), Argument("ROW_TILES", "*i32", 8)
# Sums of dK and dV of a part of a group's query heads.
PARTIAL_GRADIENTS = "DK_PARTS", "DV_PARTS"
# Rows of a tile that a program adds up.
PART_ROWS = 32
# Numbers of a tile of keys; tiles that a program ranks at a time, and sequences beside them.
KEY_TILE_WORDS, _TILES, _REQUESTS = 16, 64, 64


def row_arguments(structure: Structure, config: HopperBackwardConfig) -> list[Argument]:
    """The arguments by which rows of dK and dV are stored where a tile ends with a sequence."""
    if not structure.ragged_kv:
        return []
    if config.head_parts > 1:
        return several("*fp32", *PARTIAL_GRADIENTS, divisible_by=16)
    element, found = f"*{signature_type(structure.dtype)}", []
    for name, width in zip(("DK", "DV"), structure.head_dims, strict=True):
        found.append(Argument(f"{name}_ROWS", element, 16))
        found += dense_stride_arguments(name.lower(), "hn", width)
    return found


def render_key_tiles(structure: Structure, config: HopperBackwardConfig, device: Device) -> Source:
    """The kernel that lists the tiles of packed sequences: a program a sequence."""
    band = None if structure.mask is None else band_of(structure.mask.mod.expr)
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "WORDS": KEY_TILE_WORDS,
        "TILES": _TILES,
        "REQUESTS": _REQUESTS,
    }
    low, high = (None, None) if band is None else band
    context = {
        "band": band,
        # Whether later keys have fewer rows, and how many more rows than keys a tile has at most.
        "falls": low is not None,
        "reach": None if low is None or high is None else high - low,
    }
    found = [*several("*i32", "CU_SEQLENS", "CU_SEQLENS_K", divisible_by=4), KEY_TILES, ROW_TILES]
    found += several("i32", "q_len", "kv_len", "num_requests", "num_tiles", "num_queries")
    found += several("i32", "kv_units", "section_heads", "short_last")
    return make_small("key_tiles", structure, device, found, settings, context)


def render_sum_parts(structure: Structure, config: HopperBackwardConfig, device: Device) -> Source:
    """The kernel that adds up the parts of dK and dV: a program PART_ROWS keys of a tile's."""
    settings = {
        "BLOCK_N": config.BLOCK_N,
        "ROWS": PART_ROWS,
        "PARTS": config.head_parts,
        "WORDS": KEY_TILE_WORDS,
    }
    one = replace(config, head_parts=1)
    found = [KEY_TILES, *row_arguments(structure, config), *row_arguments(structure, one)]
    found += several("i32", "num_heads")
    widths = dict(zip(("dk", "dv"), structure.head_dims, strict=True))
    context = {"widths": {x: (n, power_above(n)) for x, n in widths.items()}}
    return make_small("sum_parts", structure, device, found, settings, context)


def make_small(
    name: str,
    structure: Structure,
    device: Device,
    found: Sequence[Argument],
    settings: Mapping[str, object],
    context: Mapping[str, object],
) -> Source:
    """A kernel around the backward's own; name: its template's, settings: the constants there."""
    context = {"constants": settings, "structure": structure, **context}
    title = f"backward {structure.dtype} D={structure.head_dim_qk}"
    return make_source(f"hopper_backward/{name}.py.jinja", device, [title], context, found)
