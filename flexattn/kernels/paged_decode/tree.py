"""Render the last kernel of a tree: states over shared keys and over own keys become one."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base import source as rendering
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.source import BASE_2, Source
from flexattn.kernels.paged_decode.source import merge_rows
from flexattn.kernels.printers.spelling import signature_type, triton_type


def render_merge_tree(
    dtype: str, heads: int, head_dim: int, levels: int, device: Device
) -> Source:
    """The kernel that merges up to `levels` shared states of a row with its own state."""
    settings = {
        "ROWS": merge_rows(head_dim),
        "HEADS": heads,
        "LEVELS": levels,
        "HEAD_DIM_V": head_dim,
    }
    context: dict[str, object] = {
        "v_pieces": rendering.named_pieces("v", head_dim),
        "constants": (*settings.items(), *BASE_2),
        "element": triton_type(dtype),
        "levels": levels,
    }
    found = []
    for out, lse in (("SHARED", "LSE_SHARED"), ("OWN", "LSE_OWN"), ("OUT", "LSE")):
        found += [Argument(out, f"*{signature_type(dtype)}", 16), Argument(lse, "*fp32", 4)]
    found += [Argument("SLOTS", "*i32", 4), Argument("num_rows", "i64")]
    title = f"merge of a tree's states {dtype} D={head_dim} for {device.arch}"
    return rendering.make_source(
        "paged_decode/merge_tree.py.jinja", device, [title], context, tuple(found), 4, 1
    )
