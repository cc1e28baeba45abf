"""The kernel that makes q, k or v of 16 or 32 bits e4m3, with factors of heads or of blocks."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, several, stride_arguments
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, make_source
from flexattn.kernels.cache_append.source import ROUNDED, rounding, rounding_instruction
from flexattn.kernels.printers.spelling import itemsize, signature_type

# Numbers that a program has at a time, and a warp: 32 a thread. With 128 a thread they spill.
_MOST, _OF_WARP = 8192, 1024


def rows_at_once(head_dim: int, rows: int) -> int:
    """Rows of a head, at most `rows`, that a program has at a time."""
    return min(rows, _MOST // power_above(head_dim))


def render_quantize(
    dtype: str,
    head_dim: int,
    rows: int,
    aligned: bool,
    by_block: bool,
    smooth: bool,
    stores: bool,
    device: Device,
) -> Source:
    """The kernel of tensors of a dtype, a program for each block of rows of a head.

    rows: of a block; where heads have factors, as many as a program has at a time. aligned:
    addresses and strides are multiples of 16 bytes. by_block: blocks have factors, which it
    computes. smooth: a mean is taken off first. stores: whether it makes numbers, or only finds
    the largest magnitudes.
    """
    wide = 16 if aligned else 1
    found = [
        Argument("X", f"*{signature_type(dtype)}", wide),
        *[Argument("OUT", "*u8", 16)] * stores,
    ]
    found += several("*fp32", *("MEAN",) * smooth, "FACTOR", divisible_by=4)
    found += stride_arguments("x", "bhn", 16 // itemsize(dtype) if aligned else 1)
    found += several("i32", "heads", "length", "num_tiles")
    width, at_once = power_above(head_dim), rows_at_once(head_dim, rows)
    elements = at_once * width
    settings = {"BLOCK_N": rows, "ROWS": at_once, "HEAD_DIM": head_dim, "TILE_D": width}
    large = elements >= ROUNDED
    context = {
        "parts": rows // at_once,
        "constants": settings | rounding("float8_e4m3fn"),
        "by_block": by_block,
        "smooth": smooth,
        "stores": stores,
        "cvt": rounding_instruction("float8_e4m3fn", device) if large else "",
    }
    header = [f"{dtype} of {head_dim} columns in e4m3 for {device.arch}"]
    name = "cache_append/quantize.py.jinja"
    warps = max(4, elements // _OF_WARP)
    return make_source(name, device, header, context, found, warps)
