"""Arguments of the Hopper backward's kernels: the launch's, and those of its scratch memory."""

from __future__ import annotations

from math import gcd

from flexattn.kernels.base.arguments import (
    M_BLOCK_MAX,
    N_BLOCK_MIN,
    Argument,
    captured_arguments,
    delta_arguments,
    descriptor,
    dropout_arguments,
    skips_vanished,
)
from flexattn.kernels.base.config import walks_runs
from flexattn.kernels.hopper_backward.config import HopperBackwardConfig, columns
from flexattn.kernels.hopper_backward.tiles import trims_runs
from flexattn.kernels.printers.gradient_printer import grad_name
from flexattn.kernels.printers.spelling import signature_type
from flexattn.problem import Structure

_SIZES = (
    "num_heads", "num_tiles", "num_queries", "kv_units", "section_heads", "group", "shared_heads",
    "q_len", "kv_len",
)  # fmt: skip
# What is left of a mask's runs by key: see templates/hopper_backward/trim.py.jinja.
M_RUNS = Argument("M_RUNS", "*i32", 4)
_COUNTER = Argument("WORK_COUNTER", "*i32", 16)
_SUMS = Argument("DQ_ACC", "*fp32", 16)
# Of a tile of dQ as the copy engine adds it.
SUMS_OF_A_ROW = 32


def flags_of(config: HopperBackwardConfig) -> str:
    """The tensor that says how far the sums of a tile are, where the copy engine adds dQ."""
    return "DQ_SEMAPHORES" if config.deterministic else "DQ_FLAGS"


def arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """Of the kernel, in order."""
    dtype, width = structure.dtype, columns(structure)
    rows, keys = config.BLOCK_M, config.BLOCK_N
    tiles = {"Q": rows, "K": keys, "V": keys, "DO": rows}
    found = [Argument(*descriptor(name, dtype, size, width)) for name, size in tiles.items()]
    found.append(Argument("STATS", _described(1, 2 * rows, swizzled=0)))
    found += [Argument(*descriptor(name, dtype, keys, width)) for name in ("DK", "DV")]
    sums = _SUMS
    if config.dq_tma:
        sums_rows = rows * width // SUMS_OF_A_ROW // (2 if config.dq_halves else 1)
        sums = Argument("DQ_ACC", _described(sums_rows, SUMS_OF_A_ROW, 128))
    found += [sums, *(Argument(name, "i32") for name in _SIZES)]
    found.append(Argument("sm_scale", "fp32"))
    if config.dq_tma:
        found.append(Argument(flags_of(config), "*i32", 16))
    found += [_COUNTER] * config.persistent
    found += dropout_arguments(structure)[:2]
    return (*found, *mod_arguments(structure, config))


def mod_arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """Of the tiles that are walked, of what mods capture, and of its gradients."""
    found = list_arguments(structure, config)
    for captures in (structure.score, structure.mask):
        found += captured_arguments(captures)
    slots = () if structure.score is None else structure.grads
    return (*found, *(Argument(grad_name(slot), "*fp32", 16) for slot in slots))


def list_arguments(structure: Structure, config: HopperBackwardConfig) -> list[Argument]:
    """Of tensors that say which tiles are walked: where weights vanish, and the lists by key."""
    found = [M_BLOCK_MAX] if skips_vanished(structure, config) else []
    if found and config.deterministic:
        found.append(N_BLOCK_MIN)
    return [*found, *_sparse(structure, config)]


def before_arguments(
    structure: Structure, config: HopperBackwardConfig, through_lse: bool
) -> tuple[Argument, ...]:
    """Of the kernel that makes delta and STATS, and clears DQ_ACC, or its flags."""
    found = delta_arguments(structure, through_lse)
    cleared = Argument(flags_of(config), "*i32", 16) if config.dq_tma else _SUMS
    found += [Argument("STATS", "*fp32", 16), cleared]
    found += [Argument(name, "i32") for name in ("Hq", "q_len", "num_queries")]
    found += [_COUNTER] * config.persistent
    return (*found, *dropout_arguments(structure)[2:])


def trim_arguments(structure: Structure) -> tuple[Argument, ...]:
    """Of the kernel that trims a mask's runs."""
    found = [M_RUNS, Argument("Q_RUNS", "*i32", 4)]
    found += [Argument(f"stride_q_mask_{axis}", "i64") for axis in "bh"]
    found += [Argument(name, "i32") for name in ("mask_heads", "num_tiles", "q_len", "kv_len")]
    return (*found, *captured_arguments(structure.mask))


def after_arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """Of the kernel that makes DQ of DQ_ACC."""
    divisor = gcd(16, structure.head_dim_qk)
    found = [Argument(flags_of(config), "*i32", 16)] if config.dq_tma else []
    found += [_SUMS, Argument("DQ", f"*{signature_type(structure.dtype)}", 16)]
    found += [Argument(f"stride_dq{axis}", "i64", divisor) for axis in "bhm"]
    found += [Argument(name, "i32") for name in ("Hq", "q_len", "num_queries")]
    return (*found, Argument("sm_scale", "fp32"))


def _described(rows: int, width: int, swizzled: int) -> str:
    """A descriptor of float32 of which shared memory swizzles so many bytes, or 0."""
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzled}, element_bitwidth=32, rank=4)"
    return f"tensordesc<fp32[1, 1, {rows}, {width}],{layout}>"


def _sparse(structure: Structure, config: HopperBackwardConfig) -> list[Argument]:
    if structure.sparsity is None:
        return []
    if trims_runs(structure, config):
        return [M_RUNS, *(Argument(f"stride_m_runs_{axis}", "i64") for axis in "bh")]
    strides = [Argument(f"stride_q_mask_{axis}", "i64") for axis in "bh"]
    if config.deterministic:
        strides += [Argument("Q_ORDER", "*i32", 4), Argument("Q_ORDER_WIDTH", "i64")]
    if walks_runs(structure, config):
        return [Argument("Q_RUNS", "*i32", 4), *strides]
    kinds = ("Q", "FULL_Q") if structure.sparsity.has_full else ("Q",)
    found = [Argument(f"{kind}_{what}", "*i32", 4) for kind in kinds for what in ("NUM", "IDX")]
    return [*found, *(Argument(f"{kind}_WIDTH", "i64") for kind in kinds), *strides]
