"""The Hopper kernel's arguments: as the Triton kernel's, with descriptors that carry layouts."""

from __future__ import annotations

from flexattn.kernels.base.arguments import Argument
from flexattn.kernels.base.arguments import arguments as triton_arguments
from flexattn.kernels.base.config import PrefillConfig
from flexattn.kernels.base.features import skips_far
from flexattn.kernels.hopper.config import CONSUMER_ROWS, GluonPrefillConfig
from flexattn.kernels.hopper.tiles import tiles_of
from flexattn.kernels.printers.triton_ops import signature_type
from flexattn.problem import Structure

__all__ = ["arguments", "consumer_arguments", "producer_arguments"]

_LOADED = tuple(f"stride_{tensor}{axis}" for tensor in "qkv" for axis in "bhmnd")
_LISTS = ("RUNS", "KV_", "FULL_", "stride_mask", "COUNTER", "REACH")
_LOCATION = ("num_tiles", "num_units", "Hq", "group")


def arguments(structure: Structure, config: GluonPrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order.

    num_units counts the row tiles of all heads; COUNTER, where blocks take them as they come, is
    one number, 0 before every launch.
    """
    like = PrefillConfig(config.BLOCK_M, config.BLOCK_N, config.num_warps, config.num_stages)
    tiles = tiles_of(structure, config)
    given, out = structure.dtype, structure.out_dtype
    # Of fp8, V comes in the output's dtype, or with its keys innermost.
    values = (config.BLOCK_N, tiles.v_width)
    described = {
        "Q": (given, CONSUMER_ROWS, tiles.qk_width),
        "K": (given, config.BLOCK_N, tiles.qk_width),
        "V": (given, *values[::-1]) if config.narrow else (out, *values),
        "OUT": (out, CONSUMER_ROWS, tiles.out_width),
    }
    found: list[Argument] = []
    for argument in triton_arguments(structure, like):
        if argument.name == "REACH" and not skips_far(structure, config):
            continue  # heads that share a tile need other keys each
        if argument.name in described:
            argument = _descriptor(argument.name, *described[argument.name])
        found.append(argument)
        if argument.name == "num_tiles":
            found.append(Argument("num_units", "i32"))
            if config.schedule == "dynamic":
                found.append(Argument("COUNTER", "*i32", 4))
    return tuple(found)


def consumer_arguments(found: tuple[Argument, ...], noted: bool, fp8: bool) -> list[str]:
    """What the consumers take from the kernel beside the output and shared memory.

    noted: the loading warp tells them where their unit lies. fp8: they read a head's factors.
    """
    told = () if not noted else ("num_",) if fp8 else ("num_", "group")
    left = ("OUT", *_LOADED, *_LISTS, *told, "stride_o")
    return [
        argument.name
        for argument in found
        if argument.type[0] != "t" and not argument.name.startswith(left)
    ]


def producer_arguments(found: tuple[Argument, ...], masked: bool) -> list[str]:
    """What the loading warp takes from the kernel beside descriptors and shared memory.

    masked: it computes something of the mask_mod.
    """
    captured = ("mask_buf", "mask_scalar") if masked else ()
    taken = (*_LISTS, *_LOCATION, "stride_kb", "q_len", "kv_len", *captured)
    return [argument.name for argument in found if argument.name.startswith(taken)]


def _descriptor(name: str, dtype: str, rows: int, width: int) -> Argument:
    return Argument(name, f"tensordesc<{signature_type(dtype)}{[1, 1, rows, width]}>")
