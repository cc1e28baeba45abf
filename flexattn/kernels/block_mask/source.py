"""Source of the kernel that classifies the blocks of a mask."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, captured_arguments
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, expression_line, make_source, mod_context
from flexattn.kernels.block_mask.bounds_printer import print_bounds, table_names
from flexattn.kernels.printers.triton_ops import signature_type
from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods.algebra import Bounds, bounds_of
from flexattn.problem import Captures

# Blocks that a program classifies.
STRIP = 128


def mask_arguments(captures: Captures, bounds: Bounds) -> tuple[Argument, ...]:
    """Arguments of the kernel that classifies the blocks of a mask."""
    found = [
        Argument("KINDS", "*i8", 16),
        Argument("first_row", "i64"),
        *(Argument(name, "i32") for name in ("H", "q_len", "kv_len", "q_blocks", "kv_blocks")),
        *captured_arguments(captures),
    ]
    for number, use in enumerate(bounds.tables):
        buffer = captures.mod.buffers[use.slot]
        element = "u8" if buffer.dtype == "bool" else signature_type(buffer.dtype)
        names = table_names(number, use, buffer.rank)
        found += [Argument(name, kind or f"*{element}") for name, kind in names]
    return tuple(found)


def render_block_mask(captures: Captures, q_block: int, kv_block: int, device: Device) -> Source:
    """The kernel that classifies every block of a mask."""
    interpreted = Traits(interpreted=device.backend == "interpreter")
    mask = print_mod(captures.mod, captures.contiguous, interpreted)
    bounds = bounds_of(captures.mod)
    printed = print_bounds(captures.mod, bounds)
    tile_m, tile_n = (min(32, power_above(block)) for block in (q_block, kv_block))
    settings = {
        "SPARSE_Q": q_block,
        "SPARSE_KV": kv_block,
        "BLOCK_M": tile_m,
        "BLOCK_N": tile_n,
        "PARTS_M": -(-q_block // tile_m),
        "PARTS_N": -(-kv_block // tile_n),
        "TILES": STRIP,
    }
    context = {
        **mod_context([mask.lines, printed.statements], device),
        "hoisted": mask.hoisted,
        "mask": mask,
        "bounds": printed,
        "tables": any(use.dim >= 0 for use in bounds.tables),
        "constants": tuple(settings.items()),
    }
    title = f"block mask {q_block}x{kv_block} for {device.arch}"
    header = [title, f"mask_mod: {expression_line(captures)}"]
    found = mask_arguments(captures, bounds)
    return make_source("block_mask/block_mask.py.jinja", device, header, context, found, 4, 1)
