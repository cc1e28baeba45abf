"""Source of the kernel that transposes V of 8 bits for wgmma."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, make_source

_TEMPLATE = "hopper/transpose_v.py.jinja"
# Keys of one program; keys that are permuted among each other.
TRANSPOSED_KEYS, PERMUTED_KEYS = 128, 16


def render_transpose_v(head_dim: int, device: Device) -> Source:
    """The kernel for one head dimension; see flexattn.runtime.transpose_v.TransposeV."""
    settings = {
        "BLOCK_N": TRANSPOSED_KEYS,
        "HEAD_DIM_V": head_dim,
        "TILE_D": power_above(head_dim),
    }
    found = [Argument("V", "*u8", 16), Argument("OUT", "*u8", 16)]
    found += [Argument(f"stride_v{axis}", "i64", 16) for axis in "bhn"]
    found += [Argument("heads", "i32"), Argument("kv_len", "i32")]
    found += [Argument("width", "i64", PERMUTED_KEYS), Argument("num_tiles", "i32")]
    header = [f"transposed V of {head_dim} for {device.arch}"]
    context: dict[str, object] = {"constants": tuple(settings.items())}
    return make_source(_TEMPLATE, device, header, context, tuple(found), 4, 1)
