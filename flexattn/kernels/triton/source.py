"""Sources of the Triton templates: prefill, decode, and the kernel that merges decode's splits."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import (
    Argument,
    attention_arguments,
    descriptor,
    output_strides,
    outputs,
    several,
    sinks,
)
from flexattn.kernels.base.config import (
    Config,
    describe,
    pieces,
    power_above,
    tiles_per_q,
    walks_runs,
)
from flexattn.kernels.base.features import (
    keys_aligned,
    loads_tiles,
    skips_far,
)
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
from flexattn.kernels.printers.mask_printer import mask_parts, whole_mask
from flexattn.kernels.printers.score_printer import print_score
from flexattn.kernels.ptx.stages import Stages
from flexattn.kernels.triton.config import DecodeConfig, PrefillConfig
from flexattn.problem import Structure

_WORKSPACE = Argument("WORKSPACE", "*fp32", 16)
_SPLITS = (Argument("num_splits", "i32"), Argument("num_rows", "i64"))


def prefill_arguments(structure: Structure, config: PrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the prefill kernel, in order."""
    if not config.use_tma:
        return attention_arguments(structure, config)
    qk, v = (pieces(dim)[0][1] for dim in structure.head_dims)
    tiles = (("Q", config.BLOCK_M, qk), ("K", config.BLOCK_N, qk), ("V", config.BLOCK_N, v))
    described = (descriptor(x, structure.dtype_of(x.lower()), *tile) for x, *tile in tiles)
    return attention_arguments(structure, config, dict(described))


def combine_arguments(structure: Structure) -> tuple[Argument, ...]:
    """Arguments of the kernel that merges the partial results of decode's splits."""
    sizes = (*several("i32", "Hq", "q_len"), *_SPLITS)
    return (_WORKSPACE, *outputs(structure), *sinks(structure), *output_strides(structure), *sizes)


def render(
    structure: Structure, config: PrefillConfig | DecodeConfig, device: Device, title: str
) -> Source:
    """The prefill or decode kernel of a structure with a config; title goes into its header."""
    prefill, sparsity = structure.kind == "prefill", structure.sparsity
    traits, runs = traits_of(device, structure), walks_runs(structure, config)
    score = mask = None
    if structure.score is not None:
        score = print_score(structure, traits)
    if structure.mask is not None and runs:
        heads = structure.packed_heads
        mask = mask_parts(structure.mask, traits, heads, _compares_ends(structure), prefill)
    elif structure.mask is not None:
        needed = "masked" if structure.batch_invariant else "i < num_kv"
        mask = whole_mask(structure.mask, traits, needed)
    settings = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    if not prefill:
        settings |= {"PACKED": structure.packed_heads, "HEAD_DIM_V": structure.head_dim_v}
    if score is not None and score.strip:
        settings["STRIP"] = power_above(config.BLOCK_M + config.BLOCK_N)
    if sparsity is not None:
        settings |= {
            "SPARSE_Q": sparsity.q_block,
            "SPARSE_KV": sparsity.kv_block,
            "TILES_PER_Q": tiles_per_q(structure, config),
            "TILES_PER_KV": -(-sparsity.kv_block // config.BLOCK_N),
        }
        if mask is not None and mask.segments is not None:
            settings["EDGE"] = power_above(sparsity.kv_block)

    context = {
        **structure_context(structure, device),
        **printed_context((score, mask), device),
        "config": config,
        "score": score,
        "mask": mask,
        "constants": settings | BASE_2,
        "runs": runs,
        "columns": prefill,
        "licm": _moves_out_of_loops(structure, config, device),
        "fold_scale": structure.positive_scale if score is None else score.folded,
        "widens": structure.kv_dtype != "",
        "by_bytes": _loads_bytes(structure),
        "decay_skip": skips_far(structure, config),
        "keys_aligned": keys_aligned(structure, config.BLOCK_N),
    }
    ptxas = split_tiles_ptxas(structure, device) if prefill else ""
    assembled = [f"assembled by {ptxas}: ptxas 12.8 makes wrong code of it"] if ptxas else []
    if isinstance(config, PrefillConfig):
        found, context["use_tma"] = prefill_arguments(structure, config), config.use_tma
    else:
        found = attention_arguments(structure, config, {}, (_WORKSPACE,), _SPLITS)
        context["use_tma"] = False
    return make_source(
        f"triton/{structure.kind}.py.jinja",
        device,
        [title, f"config: {describe(config)}", *expressions(structure), *assembled],
        context,
        found,
        config.num_warps,
        config.num_stages,
        stages=Stages(ptxas=ptxas),
    )


def _loads_bytes(structure: Structure) -> bool:
    """True if each byte of K and V is a load: of eight bits, in rows of no alignment."""
    layout = structure.layout
    wide = layout.aligned and layout.k_contiguous and layout.v_contiguous
    return "float8" in structure.dtype_of("k") and not wide


def _compares_ends(structure: Structure) -> bool:
    """True if a tile of rows compares the numbers of its first and its last block of keys."""
    sparsity = structure.sparsity
    return structure.kind == "prefill" and sparsity is not None and sparsity.kv_block <= 1024


def _moves_out_of_loops(structure: Structure, config: Config, device: Device) -> bool:
    """True if LLVM may move what does not change out of the loop over keys.

    There it stays in registers, which a warpgroup's accumulator and scores have filled. A mod that
    gathers a value for every score loses more by computing its addresses anew.
    """
    warpgroups = device.has_wgmma and structure.itemsize == 2 and structure.kind == "prefill"
    return not warpgroups or config.BLOCK_M < 64 or loads_tiles(structure)


def render_combine(structure: Structure, device: Device) -> Source:
    """The kernel that merges the splits of a decode kernel of this structure."""
    settings = {"HEAD_DIM_V": structure.head_dim_v, "BLOCK_S": 16, **BASE_2}
    context = {**structure_context(structure, device), "constants": settings}
    title = f"combine {structure.dtype} D={structure.head_dim_v} for {device.arch}"
    return make_source(
        "triton/combine.py.jinja", device, [title], context, combine_arguments(structure)
    )
