"""The kernel that turns V for Hopper's fp8 products, which want the keys side by side."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.problem import Structure
from flexattn.render.arguments import Argument
from flexattn.render.source import Source, make_source

__all__ = ["KEYS", "render_values"]

# Keys that a program turns.
KEYS = 128


def render_values(structure: Structure, device: Device) -> Source:
    """V [B, H, kv_len, D] as [B, H, D, kv_len up to whole 16], its keys in the weights' order."""
    head_dim = structure.head_dim_v
    context = {
        "constants": (("KEYS", KEYS),),
        "head_dim": head_dim,
        "columns": 1 << (head_dim - 1).bit_length(),
    }
    title = f"values {structure.dtype} D={head_dim} for {device.arch}"
    return make_source(
        "triton/values.py.jinja", device, [title], context, _arguments(), num_warps=4, num_stages=1
    )


def _arguments() -> tuple[Argument, ...]:
    return (
        Argument("V", "*i8", 16),
        Argument("VALUES", "*i8", 16),
        *(Argument(f"stride_v{axis}", "i64", 16) for axis in "bhn"),
        Argument("H", "i32"),
        Argument("kv_len", "i32"),
        Argument("width", "i32", 16),
        Argument("num_tiles", "i32"),
    )
