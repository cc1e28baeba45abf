"""Sources of the Triton backward: the kernel of all three gradients, and that of delta."""

from __future__ import annotations

from flexattn.device import Device, is_rdna
from flexattn.kernels.base.arguments import (
    M_BLOCK_MAX,
    N_BLOCK_MIN,
    Argument,
    captured_arguments,
    delta_arguments,
    dense_stride_arguments,
    descriptor,
    dropout_arguments,
    pointer,
    several,
    stride_arguments,
    strides_of,
)
from flexattn.kernels.base.config import describe, padded, pieces, power_above
from flexattn.kernels.base.features import keys_aligned
from flexattn.kernels.base.source import (
    BASE_2,
    Source,
    expressions,
    make_source,
    printed_context,
    split_tiles_ptxas,
    structure_context,
    traits_of,
)
from flexattn.kernels.printers.gradient_printer import (
    OVER_KEYS,
    OVER_ROWS,
    PrintedGradient,
    grad_name,
    print_with_gradients,
)
from flexattn.kernels.printers.spelling import signature_type
from flexattn.kernels.printers.triton_printer import Printed
from flexattn.kernels.ptx.stages import Stages
from flexattn.kernels.triton_backward.config import (
    BackwardConfig,
    reads_runs,
    skips_blocks,
    tile_counts,
)
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
    """The arguments of the kernel that makes dQ, dK and dV; runs: it reads the runs of a mask's
    rows.
    """
    element = f"*{signature_type(structure.dtype)}"
    found = [pointer(tensor, structure) for tensor in "qkv"]
    found += several(element, "DO", divisible_by=16)
    found += several("*fp32", "LSE", "DELTA", divisible_by=16)
    found += several(element, "DQ", "DK", "DV", divisible_by=16)
    found += [each for tensor in "qkv" for each in strides_of(tensor, structure)]
    found += dense_stride_arguments("do", "bhm", structure.head_dim_v)
    found += dense_stride_arguments("dq", "bhm", structure.head_dim_qk)
    found += dense_stride_arguments("dk", "bhn", structure.head_dim_qk)
    found += dense_stride_arguments("dv", "bhn", structure.head_dim_v)
    found += several("i32", *_SIZES)
    found.append(Argument("sm_scale", "fp32"))
    if skips_blocks(structure, config) is not None:
        found += [M_BLOCK_MAX, N_BLOCK_MIN]
    found += _sparse(structure, runs)
    found += captured_arguments(structure.score, structure.mask)
    found += dropout_arguments(structure)
    found += several("*fp32", *map(grad_name, structure.grads), divisible_by=16)
    found += [Argument(*each) for each in _tiles(structure, config)]
    return tuple(found)


def _tiles(structure: Structure, config: BackwardConfig) -> list[tuple[str, str]]:
    """Descriptors of what is walked, and their types."""
    if not config.use_tma:
        return []
    qk, v = (pieces(dim)[0][1] for dim in structure.head_dims)
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
        found += stride_arguments(f"{name.lower()}_mask_", "bh")
    return found


def _reloads(structure: Structure, device: Device) -> bool:
    """True if a program reads its own tiles anew at each turn of its loop, as it does others'.

    A wave of RDNA has 256 registers. Operands of 16 rows take one of them for each four bytes of a
    row of RDNA4's, and two of RDNA3's, whose matrix instructions read them in both halves of a
    wave: held through the loop they leave none for what is walked.
    """
    widest = 64 if device.arch.startswith("gfx11") else 128
    return is_rdna(device) and max(structure.head_dims) > widest


# Elements of the output that a program of delta reads at once.
_ELEMENTS = 4096


def render(structure: Structure, config: BackwardConfig, device: Device, title: str) -> Source:
    """The backward kernel of a structure with a config; title goes into its header."""
    traits, reload = traits_of(device, structure), _reloads(structure, device)
    over_keys, mask_over_keys = print_with_gradients(
        structure, traits._replace(dialect=OVER_KEYS), structure.grads
    )
    over_rows, mask_over_rows = print_with_gradients(structure, traits._replace(dialect=OVER_ROWS))
    sparsity, skipped = structure.sparsity, skips_blocks(structure, config)
    settings: dict[str, int] = dict(config.tiles)
    if sparsity is not None:
        settings |= {"SPARSE_Q": sparsity.q_block, "SPARSE_KV": sparsity.kv_block}
        settings |= tile_counts(sparsity, config)
    if skipped is not None:
        settings |= dict(zip(("SKIP_M", "SKIP_N"), skipped, strict=True))
    printed = (over_keys, mask_over_keys, over_rows, mask_over_rows)
    context = {
        **structure_context(structure, device, reload and max(structure.head_dims) > 128),
        **printed_context(printed, device),
        "config": config,
        "over_keys": over_keys,
        "over_rows": over_rows,
        "scatters": () if over_keys is None else over_keys.scatters,
        "mask_over_keys": mask_over_keys,
        "mask_over_rows": mask_over_rows,
        "hoisted_over_keys": _hoisted(over_keys, mask_over_keys),
        "hoisted_over_rows": _hoisted(over_rows, mask_over_rows),
        "constants": settings | BASE_2,
        "runs": reads_runs(structure, config),
        "natural": structure.dtype == "float32",
        "far": structure.far,
        "decay_skip": skipped is not None,
        "reload": reload,
        "keys_aligned": keys_aligned(structure, config.BLOCK_N1, config.BLOCK_N2),
    }
    return make_source(
        "triton_backward/backward.py.jinja",
        device,
        [title, f"config: {describe(config)}", *expressions(structure)],
        context,
        backward_arguments(structure, config, reads_runs(structure, config)),
        config.num_warps,
        config.num_stages,
        stages=Stages(ptxas=split_tiles_ptxas(structure, device)),
    )


def rows_of_delta(structure: Structure) -> int:
    """The number of query rows of a head that a program of delta takes."""
    return max(16, min(128, _ELEMENTS // power_above(padded(structure.head_dim_v))))


def render_delta(structure: Structure, device: Device, through_lse: bool) -> Source:
    """The kernel that makes delta, which every backward reads; through_lse: lse has a gradient."""
    context = {
        **structure_context(structure, device),
        "constants": {"ROWS": rows_of_delta(structure)},
        "through_lse": through_lse,
    }
    title = f"delta {structure.dtype} D={structure.head_dim_v} for {device.arch}"
    found = (*delta_arguments(structure, through_lse), *several("i32", "Hq", "q_len"))
    return make_source("triton_backward/delta.py.jinja", device, [title], context, found)


def _hoisted(score: PrintedGradient | None, mask: Printed | None) -> tuple[str, ...]:
    return tuple(line for each in (score, mask) if each is not None for line in each.hoisted)
