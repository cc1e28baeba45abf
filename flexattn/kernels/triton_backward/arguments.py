"""Arguments of a backward's kernels: what any family that computes gradients is given."""

from __future__ import annotations

from flexattn.kernels.base.arguments import (
    Argument,
    captured_arguments,
    descriptor,
    dropout_arguments,
    pointer,
    strides_of,
)
from flexattn.kernels.base.config import pieces
from flexattn.kernels.base.delta import dense_stride_arguments
from flexattn.kernels.base.vanishing import M_BLOCK_MAX, N_BLOCK_MIN
from flexattn.kernels.printers.gradient_printer import grad_name
from flexattn.kernels.printers.triton_ops import signature_type
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.kernels.triton_backward.tiles import skips_blocks
from flexattn.problem import Structure

_SIZES = (
    "Hq", "group", "q_len", "kv_len", "shared_heads", "kv_units", "kv_programs", "q_units",
    "q_tiles",
)  # fmt: skip
# The lists of a mask in both directions, and their widths.
_LISTS = ("KV", "Q")


def backward_arguments(
    structure: Structure, config: BackwardConfig, runs: bool
) -> tuple[Argument, ...]:
    """Of the kernel that makes dQ, dK and dV; runs: it reads the runs of a mask's rows."""
    element = f"*{signature_type(structure.dtype)}"
    found = [pointer(tensor, structure) for tensor in "qkv"]
    found += [Argument("DO", element, 16), Argument("LSE", "*fp32", 16)]
    found += [Argument("DELTA", "*fp32", 16)]
    found += [Argument(name, element, 16) for name in ("DQ", "DK", "DV")]
    found += [each for tensor in "qkv" for each in strides_of(tensor, structure)]
    found += dense_stride_arguments("do", "bhm", structure.head_dim_v)
    found += dense_stride_arguments("dq", "bhm", structure.head_dim_qk)
    found += dense_stride_arguments("dk", "bhn", structure.head_dim_qk)
    found += dense_stride_arguments("dv", "bhn", structure.head_dim_v)
    found += [Argument(name, "i32") for name in _SIZES]
    found.append(Argument("sm_scale", "fp32"))
    if skips_blocks(structure, config) is not None:
        found += [M_BLOCK_MAX, N_BLOCK_MIN]
    found += _sparse(structure, runs)
    for captures in (structure.score, structure.mask):
        found += captured_arguments(captures)
    found += dropout_arguments(structure)
    found += [Argument(grad_name(slot), "*fp32", 16) for slot in structure.grads]
    found += [Argument(*each) for each in _tiles(structure, config)]
    return tuple(found)


def _tiles(structure: Structure, config: BackwardConfig) -> list[tuple[str, str]]:
    """Descriptors of what is walked, and their types."""
    if not config.use_tma:
        return []
    qk, v = (pieces(dim)[0][1] for dim in (structure.head_dim_qk, structure.head_dim_v))
    rows, keys, dtype = config.BLOCK_M1, config.BLOCK_N2, structure.dtype
    sizes = {"Q": (rows, qk), "DO": (rows, v), "K": (keys, qk), "V": (keys, v)}
    return [descriptor(f"{name}_TILES", dtype, *size) for name, size in sizes.items()]


def _sparse(structure: Structure, runs: bool) -> list[Argument]:
    if structure.sparsity is None:
        return []
    full = structure.sparsity.has_full
    found: list[Argument] = []
    for name in _LISTS:
        if runs:
            found.append(Argument(f"{name}_RUNS", "*i32", 4))
        else:
            kinds = (name, f"FULL_{name}") if full else (name,)
            found += [Argument(f"{kind}_{x}", "*i32", 4) for kind in kinds for x in ("NUM", "IDX")]
            found += [Argument(f"{kind}_WIDTH", "i64") for kind in kinds]
        found += [Argument(f"stride_{name.lower()}_mask_{axis}", "i64") for axis in "bh"]
    return found
