"""The Hopper kernel's arguments, and which of them its warps take."""

from __future__ import annotations

from flexattn.kernels.base.arguments import Argument, attention_arguments, descriptor
from flexattn.kernels.hopper.config import CONSUMER_ROWS, HopperPrefillConfig
from flexattn.kernels.hopper.tiles import tiles_of
from flexattn.problem import Structure

_LOADED = tuple(f"stride_{tensor}{axis}" for tensor in "qkv" for axis in "bhmnd")
_LISTS = ("RUNS", "KV_", "FULL_", "stride_mask", "COUNTER", "DECAY_WINDOW")
_LOCATION = ("num_tiles", "num_work_tiles", "Hq", "group")


def arguments(structure: Structure, config: HopperPrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order.

    num_work_tiles counts the row tiles of all heads; COUNTER is the dynamic tile scheduler's, one
    number, 0 before every launch.
    """
    tiles = tiles_of(structure, config)
    given, out = structure.dtype, structure.out_dtype
    keys = config.BLOCK_N
    described = (
        descriptor("Q", given, CONSUMER_ROWS, tiles.qk_width),
        descriptor("K", given, keys, tiles.qk_width),
        # Of fp8, V comes in the output's dtype.
        descriptor("V", out, keys, tiles.v_box),
        descriptor("OUT", out, CONSUMER_ROWS, tiles.out_width),
    )
    counts = config.tile_scheduler == "dynamic"
    sizes = (Argument("num_work_tiles", "i32"), *(Argument("COUNTER", "*i32", 4),) * counts)
    return attention_arguments(structure, config, dict(described), sizes=sizes)


def consumer_arguments(
    found: tuple[Argument, ...], work_tile_in_smem: bool, fp8: bool
) -> list[str]:
    """What the consumers take from the kernel beside the output and shared memory.

    work_tile_in_smem: the producer writes their work tile into shared memory. fp8: they read a
    head's factors.
    """
    scheduler = ("num_",) if fp8 else ("num_", "group")
    left = ("OUT", *_LOADED, *_LISTS, *scheduler * work_tile_in_smem, "stride_o")
    return [
        argument.name
        for argument in found
        if argument.type[0] != "t" and not argument.name.startswith(left)
    ]


def producer_arguments(found: tuple[Argument, ...], masked: bool) -> list[str]:
    """What the producer takes from the kernel beside descriptors and shared memory.

    masked: it computes something of the mask_mod.
    """
    captured = ("mask_buf", "mask_scalar") if masked else ()
    taken = (*_LISTS, *_LOCATION, "stride_kb", "q_len", "kv_len", *captured)
    return [argument.name for argument in found if argument.name.startswith(taken)]
