"""The kernel that makes q, k or v of 16 or 32 bits e4m3, with factors of heads or of blocks."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, several, stride_arguments
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, make_source
from flexattn.kernels.cache_append.source import ROUNDED, rounding, rounding_instruction
from flexattn.kernels.printers.spelling import itemsize, signature_type


def render_quantize(
    dtype: str,
    head_dim: int,
    rows: int,
    aligned: bool,
    by_block: bool,
    smooth: bool,
    device: Device,
) -> Source:
    """The kernel of tensors of a dtype, a program for each block of rows of a head.

    aligned: addresses and strides are multiples of 16 bytes. by_block: blocks have factors, which
    it computes. smooth: a mean is taken off first.
    """
    wide = 16 if aligned else 1
    found = [Argument("X", f"*{signature_type(dtype)}", wide), Argument("OUT", "*u8", 16)]
    found += several("*fp32", *("MEAN",) * smooth, "FACTOR", divisible_by=4)
    found += stride_arguments("x", "bhn", 16 // itemsize(dtype) if aligned else 1)
    found += several("i32", "heads", "length", "num_tiles")
    settings = {"BLOCK_N": rows, "HEAD_DIM": head_dim, "TILE_D": power_above(head_dim)}
    large = rows * settings["TILE_D"] >= ROUNDED
    context = {
        "constants": settings | rounding("float8_e4m3fn"),
        "by_block": by_block,
        "smooth": smooth,
        "cvt": rounding_instruction("float8_e4m3fn", device) if large else "",
    }
    header = [f"{dtype} of {head_dim} columns in e4m3 for {device.arch}"]
    name = "cache_append/quantize.py.jinja"
    return make_source(name, device, header, context, found)
