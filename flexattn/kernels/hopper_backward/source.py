"""Sources of the Hopper backward: what comes before it, the kernel, and what comes after."""

from __future__ import annotations

from dataclasses import replace

from flexattn.device import Device
from flexattn.kernels.base.arguments import (
    M_BLOCK_MAX,
    N_BLOCK_MIN,
    Argument,
    captured_arguments,
    delta_arguments,
    dense_stride_arguments,
    descriptor,
    dropout_arguments,
    several,
    skips_vanished,
    stride_arguments,
)
from flexattn.kernels.base.config import TWO_BLOCKS_KEYS, describe, walks_runs
from flexattn.kernels.base.source import (
    BASE_2,
    Source,
    expressions,
    make_source,
    named_pieces,
    printed_context,
    traits_of,
)
from flexattn.kernels.hopper_backward.config import (
    BLOCK_WARPS,
    HopperBackwardConfig,
    chunks,
    columns,
    is_lean,
    trims_runs,
    value_columns,
)
from flexattn.kernels.hopper_backward.masks import (
    Band,
    asked_by_row,
    band_and_rest,
    may_be_no_number,
    reads_diagonals,
    sums_heads,
)
from flexattn.kernels.hopper_backward.narrow import (
    added_sums,
    announcements,
    cut_sums,
    dq_boxes,
    dq_size,
    holds_half,
    summed,
)
from flexattn.kernels.hopper_backward.ragged import (
    KEY_TILE_WORDS,
    KEY_TILES,
    ROW_TILES,
    make_small,
    row_arguments,
)
from flexattn.kernels.hopper_backward.two_buffers import ANNOUNCED
from flexattn.kernels.printers.gradient_printer import (
    grad_name,
    print_with_gradients,
)
from flexattn.kernels.printers.spelling import Dialect, TensorForm, signature_type
from flexattn.kernels.printers.triton_printer import View, print_mod
from flexattn.kernels.ptx.assembler import waits_meet
from flexattn.kernels.ptx.narrow_products import NARROW_PRODUCTS
from flexattn.kernels.ptx.stages import Stages
from flexattn.mods.expr import Expr, reads
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


def arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """The arguments of the kernel, in order."""
    dtype, width = structure.dtype, columns(structure)
    rows, keys = config.BLOCK_M, config.BLOCK_N
    v_width = value_columns(structure, config)
    tiles = {"Q": (rows, width), "K": (keys, width), "V": (keys, v_width), "DO": (rows, v_width)}
    if chunks(structure, config):
        tiles = dict.fromkeys(tiles, (32, 64))
    found = [Argument(*descriptor(name, dtype, *size)) for name, size in tiles.items()]
    found.append(Argument("STATS", _described(1, 2 * rows, swizzled=0)))
    found += [Argument(*descriptor(f"D{name}", dtype, *tiles[name])) for name in "KV"]
    sums = _SUMS
    if config.dq_tma:
        sums_rows = rows * width // SUMS_OF_A_ROW // dq_boxes(structure, config).count
        sums = Argument("DQ_ACC", _described(sums_rows, SUMS_OF_A_ROW, 128))
    found += [sums, *several("i32", *_sizes(structure))]
    found.append(Argument("sm_scale", "fp32"))
    if config.dq_tma:
        found.append(Argument(config.flags, "*i32", 16))
    found += [_COUNTER] * config.persistent
    found += dropout_arguments(structure)[:2]
    found += row_arguments(structure, config)
    return (*found, *mod_arguments(structure, config))


def _sizes(structure: Structure) -> tuple[str, ...]:
    """The names of numbers; packed sequences have lengths of their own."""
    return _SIZES[:-2] if structure.ragged_kv else _SIZES


def mod_arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """The arguments for the walked tiles, for what mods capture, and for its gradients."""
    found = list_arguments(structure, config)
    found += captured_arguments(structure.score, structure.mask)
    slots = () if structure.score is None else structure.grads
    return (*found, *several("*fp32", *map(grad_name, slots), divisible_by=16))


def list_arguments(structure: Structure, config: HopperBackwardConfig) -> list[Argument]:
    """The tensors that say which tiles are walked: where weights vanish, and the lists by key."""
    found = [M_BLOCK_MAX] if skips_vanished(structure, config) else []
    if found and config.deterministic:
        found.append(N_BLOCK_MIN)
    found += [KEY_TILES] * structure.ragged_kv
    return [*found, *_sparse(structure, config)]


def before_arguments(
    structure: Structure, config: HopperBackwardConfig, through_lse: bool
) -> tuple[Argument, ...]:
    """The arguments of the kernel that makes delta and STATS, and clears DQ_ACC, or its flags."""
    found = delta_arguments(structure, through_lse)
    cleared = Argument(config.flags, "*i32", 16) if config.dq_tma else _SUMS
    found += [Argument("STATS", "*fp32", 16), cleared]
    found += several("i32", "Hq", "q_len", "num_queries")
    found += [_COUNTER] * config.persistent + [ROW_TILES] * structure.ragged_kv
    return (*found, *dropout_arguments(structure)[2:])


def trim_arguments(structure: Structure) -> tuple[Argument, ...]:
    """The arguments of the kernel that trims a mask's runs."""
    found = [M_RUNS, Argument("Q_RUNS", "*i32", 4)]
    found += stride_arguments("q_mask_", "bh")
    found += several("i32", "mask_heads", "num_tiles", "q_len", "kv_len")
    return (*found, *captured_arguments(structure.mask))


def after_arguments(structure: Structure, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """The arguments of the kernel that makes DQ of DQ_ACC."""
    found = [Argument(config.flags, "*i32", 16)] if config.dq_tma else []
    found += [_SUMS, Argument("DQ", f"*{signature_type(structure.dtype)}", 16)]
    found += dense_stride_arguments("dq", "bhm", structure.head_dim_qk)
    found += several("i32", "Hq", "q_len", "num_queries")
    found += [ROW_TILES] * structure.ragged_kv
    return (*found, Argument("sm_scale", "fp32"))


def _described(rows: int, width: int, swizzled: int) -> str:
    """A descriptor of float32 of which shared memory swizzles so many bytes, or 0."""
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzled}, element_bitwidth=32, rank=4)"
    return f"tensordesc<fp32[1, 1, {rows}, {width}],{layout}>"


def _sparse(structure: Structure, config: HopperBackwardConfig) -> list[Argument]:
    if structure.sparsity is None:
        return []
    if trims_runs(structure, config):
        return [M_RUNS, *stride_arguments("m_runs_", "bh")]
    strides = stride_arguments("q_mask_", "bh")
    if config.deterministic:
        strides += [Argument("Q_ORDER", "*i32", 4), Argument("Q_ORDER_WIDTH", "i64")]
    if walks_runs(structure, config):
        return [Argument("Q_RUNS", "*i32", 4), *strides]
    kinds = ("Q", "FULL_Q") if structure.sparsity.has_full else ("Q",)
    found = [Argument(f"{kind}_{what}", "*i32", 4) for kind in kinds for what in ("NUM", "IDX")]
    return [*found, *(Argument(f"{kind}_WIDTH", "i64") for kind in kinds), *strides]


_TEMPLATE = "hopper_backward/dkdvdq.py.jinja"
_TWO_BUFFERS = "hopper_backward.two_buffers"
_HARDWARE_BARRIERS = 16
# Those at which the warps that add tiles of dq meet the consumers, below those of three stages: of
# each there is one more where two warps do so. DQ_READ is used with dq_halves alone.
DQ_STORED, DQ_READ = 5, 8
# The first of two at which the loading warp of a persistent block waits until K and V have been
# read.
KEYS_READ = 6
# The flag of a tile of dQ that has sums. Before, it is 0, and 1 while the first block stores its
# part.
SUMMED = 2
# A row of a tile is a key, and what is walked are queries: see OVER_ROWS of the gradient printer.
TRANSPOSED = Dialect(
    "gl",
    "gluon.jit",
    gluon=True,
    rows="BLOCK_N",
    tile=TensorForm("[BLOCK_N, BLOCK_M]", "MMA_S"),
    key=TensorForm("[1, BLOCK_M]", "MMA_S"),
    row=TensorForm("[BLOCK_N]", "BY_KEY"),
    over_rows="BY_KEY",
    over_keys="BY_ROW",
    walked="q_idx",
    within="start_m < q_len",
)


def render(
    structure: Structure, config: HopperBackwardConfig, device: Device, title: str
) -> Source:
    """The kernel of a structure with a config; title goes into its header."""
    # With Triton 3.9's loop, and in tiles of 64 keys, ptxas spills behind such a branch, and
    # behind such a selection.
    spills = waits_meet() or config.BLOCK_N == 64
    end = "" if spills else "start_m + BLOCK_M"
    traits = traits_of(device, structure)._replace(dialect=TRANSPOSED._replace(end=end))
    (band, rest), asked = (None, None), structure
    if structure.mask is not None:
        # A mask_mod that asks for no more than the rest.
        mod = structure.mask.mod
        band, rest = band_and_rest(mod.expr)
        left = None if rest is None else replace(structure.mask, mod=replace(mod, expr=rest))
        asked = replace(structure, mask=left)
    score, mask = print_with_gradients(asked, traits, structure.grads)
    if asked.mask is not None and asked_by_row(structure, config.BLOCK_N):
        mask = print_mod(asked.mask, traits, View(kv_idx="start_n", by_row=False))
    sparsity, stages = structure.sparsity, _stages(structure, config)
    found, narrow = arguments(structure, config), announcements(structure, config)
    pieces = chunks(structure, config)
    joined = walks_runs(structure, config) or structure.ragged_kv or pieces is not None
    context = {
        **printed_context((score, mask), device, TRANSPOSED),
        **_shapes(config, columns(structure)),
        "api": "flexattn.gluon_api",
        "constants": _settings(structure, config) | BASE_2,
        "mod_arguments": [each.name for each in mod_arguments(structure, config)],
        "list_arguments": [each.name for each in list_arguments(structure, config)],
        "config": config,
        "structure": structure,
        "score": score,
        "stray": structure.score is not None and may_be_no_number(structure.score.mod.expr),
        "diagonals": reads_diagonals(structure),
        "of_heads": sums_heads(structure),
        "mask": mask,
        "band": band,
        "conjunction": not spills and _selects_twice(band, rest),
        # Beside a score_mod or dropout, what a mask asks for besides a band leaves none for lse.
        "masked_lse": rest is None or not (structure.score or structure.dropout),
        "indexed": score is not None or mask is not None,
        "ragged": structure.ragged_kv,
        "row_arguments": [each.name for each in row_arguments(structure, config)],
        "chunks": pieces,
        "listed": sparsity is not None or joined,
        "some_masked": sparsity is not None or band is not None or pieces is not None,
        "joined": joined,
        "runs": walks_runs(structure, config),
        "trimmed": trims_runs(structure, config),
        "decay_skip": skips_vanished(structure, config),
        "has_full": sparsity is not None and sparsity.has_full,
        "dp_rs": config.dp_rs and config.BLOCK_N == 128,
        "v_half": holds_half(structure, config),
        "narrow": narrow,
        "lean": is_lean(structure, config),
        "v_dim": "V_DIM" if is_lean(structure, config) else "HEAD_DIM",
        "dq_boxes": dq_boxes(structure, config),
        "added": added_sums(structure, config),
        "dq_size": dq_size(structure),
        "shift_rows": config.shift_rows
        and sparsity is None
        and not (config.deterministic or structure.ragged_kv),
        "announcement": ANNOUNCED,
        "adding_warps": _adding_warps(config),
        "drawing_warps": _drawing_warps(config),
        "drawn_apart": config.BLOCK_M * config.BLOCK_N < 4096 * _drawing_warps(config),
        "beside_warps": [4] * config.by_product + _beside(structure, config),
        "beside_registers": [240] * config.by_product + [24] * len(_beside(structure, config)),
        "half": "bf16" if structure.dtype == "bfloat16" else "f16",
        "found_ahead": config.persistent
        and config.mha
        and (sparsity is not None or structure.ragged_kv),
    }
    header = [title, f"config: {describe(config)}", *expressions(structure)]
    return make_source(
        _TEMPLATE,
        device,
        header,
        context,
        found,
        BLOCK_WARPS // 2 if config.by_product else BLOCK_WARPS,
        config.num_stages,
        "gluon",
        stages=stages,
    )


def _stages(structure: Structure, config: HopperBackwardConfig) -> Stages:
    """The passes over PTX that a kernel asks for."""
    passes = (_TWO_BUFFERS,) * (config.ds_stages == 2)
    return Stages(passes + (NARROW_PRODUCTS,) * any(announcements(structure, config).values()))


def render_before(
    structure: Structure, config: HopperBackwardConfig, device: Device, through_lse: bool
) -> Source:
    """The kernel that makes delta and STATS and clears what sums up dq; through_lse: of lse, too.

    A program has a tile of a head.
    """
    settings = {"BLOCK_M": config.BLOCK_M, "HEAD_DIM": columns(structure)}
    cut = {} if config.dq_tma else cut_sums(structure)
    context = {
        "cut": cut,
        "dq_size": dq_size(structure),
        "v_pieces": named_pieces("v", structure.head_dim_v),
        "through_lse": through_lse,
        "ragged": structure.ragged_kv,
        "config": config,
    }
    found = before_arguments(structure, config, through_lse)
    return make_small("before", structure, device, found, {**settings, **cut, **BASE_2}, context)


def _selects_twice(band: Band | None, rest: Expr | None) -> bool:
    """True if a mask is a conjunction whose rest differs by query and key."""
    if rest is None or (band is None and rest.op != "and"):
        return False
    return all(reads(rest, name) for name in ("q_idx", "kv_idx"))


def render_trim(structure: Structure, config: HopperBackwardConfig, device: Device) -> Source:
    """The kernel that trims a mask's runs: a program a tile of keys, of each head that differs."""
    assert structure.mask is not None and structure.sparsity is not None
    captures, traits = structure.mask, traits_of(device, structure)
    mask = print_mod(captures, traits)
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "SPARSE_KV": structure.sparsity.kv_block,
        "TILES_PER_Q": structure.sparsity.q_block // config.BLOCK_M,
    }
    context = {**printed_context((mask,), device), "mask": mask}
    return make_small("trim", structure, device, trim_arguments(structure), settings, context)


def render_after(structure: Structure, config: HopperBackwardConfig, device: Device) -> Source:
    """The kernel that makes DQ of DQ_ACC: a program a tile of a head."""
    width, cut, dim = columns(structure), cut_sums(structure), structure.head_dim_qk
    context = {
        "cut": cut,
        "dq_size": dq_size(structure),
        **_places(config, width),
        # The columns of dq, where its tiles have more.
        "used": dim if dim < width else 0,
        "ragged": structure.ragged_kv,
        "config": config,
    }
    found = after_arguments(structure, config)
    settings = {"BLOCK_M": config.BLOCK_M, "HEAD_DIM": width, **cut}
    return make_small("after", structure, device, found, settings, context)


def _settings(structure: Structure, config: HopperBackwardConfig) -> dict[str, object]:
    """The constants of the kernel."""
    rows, sparsity = config.BLOCK_M, structure.sparsity
    free_do = _HARDWARE_BARRIERS - config.num_stages
    free_q = free_do - config.num_stages
    settings = {
        "BLOCK_M": rows,
        "BLOCK_N": config.BLOCK_N,
        "HEAD_DIM": columns(structure),
        "STAGES": config.num_stages,
        "Q_TYPE": f"gl.{structure.dtype}",
        "FREE_DO": free_do,
        "FREE_Q": free_q,
    }
    if is_lean(structure, config):
        settings["V_DIM"] = value_columns(structure, config)
    if summed(structure) and not config.dq_tma:
        settings["SUMS"] = summed(structure)
    if config.persistent:
        settings["KEYS_READ"] = KEYS_READ
    if config.by_product:
        # Two of each: a warpgroup may be a tile ahead.
        settings |= {"W_STORED": free_q - 2, "DS_STORED": free_q - 4}
    if config.dq_tma:
        settings["DQ_STORED"] = DQ_STORED
        if config.dq_halves:
            settings["DQ_READ"] = DQ_READ
        if not config.deterministic:
            settings["SUMMED"] = SUMMED
    if structure.dropout:
        settings["KEPT_READ"] = free_q - 1
        # A thread makes four calls for what it stores, or it and its neighbour make two each.
        calls, threads = rows * config.BLOCK_N // 128, 32 * _drawing_warps(config)
        at_once = min(calls, threads)
        settings |= {"DRAWN_AT_ONCE": at_once, "DRAWN_PARTS": calls // at_once}
    if structure.ragged_kv:
        settings["WORDS"] = KEY_TILE_WORDS
    if sparsity is not None:
        settings |= _of_blocks(structure, config)
        if config.deterministic:
            settings["TILES_PER_KV"] = sparsity.kv_block // config.BLOCK_N
    return settings


def _of_blocks(structure: Structure, config: HopperBackwardConfig) -> dict[str, object]:
    """The size of what a mask lists, in keys and tiles: blocks, or tiles of trimmed runs."""
    sparsity = structure.sparsity
    if sparsity is None or trims_runs(structure, config):
        return {"SPARSE_KV": config.BLOCK_N, "TILES_PER_Q": 1}
    return {"SPARSE_KV": sparsity.kv_block, "TILES_PER_Q": sparsity.q_block // config.BLOCK_M}


def _adding_warps(config: HopperBackwardConfig) -> int:
    return config.dq_tma + (config.deterministic or config.dq_halves)


def _drawing_warps(config: HopperBackwardConfig) -> int:
    """Warps that draw what dropout keeps.

    Four beside tiles of 64 x 128, one on each scheduler. Else as many as fill up the warpgroup of
    the loading warp, beside those that add dQ.
    """
    if config.deterministic:
        return 1
    return 4 if (config.BLOCK_M, config.BLOCK_N) == (64, 128) else 2


def _beside(structure: Structure, config: HopperBackwardConfig) -> list[int]:
    """Warps of each partition beside the consumers; the first one loads."""
    drawing = [_drawing_warps(config)] if structure.dropout else []
    return [1, *drawing, *[1] * _adding_warps(config)]


def _shapes(config: HopperBackwardConfig, head_dim: int) -> dict[str, object]:
    """The layout of warps over the tiles, as the template's constants."""
    rows = config.BLOCK_M
    shared = {
        "s_warps": [4, 2] if config.split else [8, 1],
        "s_columns": rows // 2 if config.split else rows,
        "dkv_columns": head_dim // 2 if config.split else head_dim,
        **_places(config, head_dim),
        "per_thread": rows * head_dim // (32 * BLOCK_WARPS),
    }
    if config.BLOCK_N == TWO_BLOCKS_KEYS:
        shared |= {"s_columns": 128, "dkv_columns": 128, "dq_columns": 64}
    # By products a tile is one warpgroup's, and of dq half the columns are.
    return shared | {"s_warps": [4, 1], "dq_warps": [4, 1]} if config.by_product else shared


def _places(config: HopperBackwardConfig, width: int) -> dict[str, object]:
    """The layout of warps over a tile of dq, `width` columns wide, as the template's constants."""
    tall = config.BLOCK_M == 64 * BLOCK_WARPS // 4
    # Of tiles of 128 keys above 128 columns that is the first of two products.
    half = min(64, width // 2) if config.BLOCK_N == 128 else width // 2
    return {
        "dq_warps": [BLOCK_WARPS, 1] if tall else [BLOCK_WARPS // 2, 2],
        "dq_columns": width if tall else half,
    }
