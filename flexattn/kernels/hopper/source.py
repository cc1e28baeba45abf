"""Source of the Hopper kernel: its arguments, its mods as Gluon, and its template's context."""

from __future__ import annotations

import struct
from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.arguments import (
    Argument,
    attention_arguments,
    descriptor,
    several,
    stride_arguments,
)
from flexattn.kernels.base.config import describe, power_above, touched_runs
from flexattn.kernels.base.family import PERMUTED_KEYS, TRANSPOSED_KEYS
from flexattn.kernels.base.features import ALL_KEYS, keys_aligned, skips_far
from flexattn.kernels.base.mask_pieces import print_mask
from flexattn.kernels.base.ragged import (
    arguments as ragged_arguments,
    described_rows,
    form_of,
    gathers,
)
from flexattn.kernels.base.source import (
    BASE_2,
    Source,
    expressions,
    make_source,
    printed_context,
    traits_of,
)
from flexattn.kernels.hopper import merge_consumers, ragged
from flexattn.kernels.hopper.config import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    TWO_BLOCKS_THREAD,
    WIDEST,
    HopperPrefillConfig,
    Tiles,
    tiles_of,
)
from flexattn.kernels.hopper.limits import case_of
from flexattn.kernels.printers.score_printer import PrintedScore, print_score as triton_score
from flexattn.kernels.printers.spelling import Dialect, TensorForm, gluon_dialect, signature_type
from flexattn.kernels.printers.triton_printer import Traits
from flexattn.kernels.ptx.assembler import effective, for_split_tiles
from flexattn.kernels.ptx.narrow_products import NARROW_PRODUCTS, from_registers
from flexattn.kernels.ptx.stages import Stages
from flexattn.problem import ITEMSIZE, Structure

_LOADED = tuple(f"stride_{tensor}{axis}" for tensor in "qkv" for axis in "bhmnd")
_LISTS = ("RUNS", "KV_", "FULL_", "stride_mask", "COUNTER", "DECAY_WINDOW")
_FACTORS = tuple(name for x in "qkv" for name in (f"{x.upper()}_DESCALE", f"{x}_descale"))
_LOCATION = ("num_tiles", "num_work_tiles", "Hq", "group")


def arguments(structure: Structure, config: HopperPrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order.

    num_work_tiles counts the row tiles of all heads; COUNTER is the dynamic tile scheduler's, one
    number, 0 before every launch.
    """
    tiles = tiles_of(structure, config)
    given, out = structure.dtype, structure.out_dtype
    form = form_of(structure)
    keys = config.BLOCK_N if form is None else ragged.box_rows(form, config)
    # Of fp8, V comes in the output's dtype, or with its keys innermost.
    values = (tiles.v_box, keys) if structure.e4m3_weights else (keys, tiles.v_box)
    v_dtype = structure.value_dtype if form is None else structure.dtype_of("v")
    described = dict((
        descriptor("Q", given, CONSUMER_ROWS, tiles.qk_width),
        descriptor("K", structure.dtype_of("k"), keys, tiles.qk_width),
        descriptor("V", v_dtype, *values),
        descriptor("OUT", out, CONSUMER_ROWS, tiles.out_width),
    ))  # fmt: skip
    if form is not None:
        described |= (
            described_rows("Q", given, CONSUMER_ROWS, tiles.qk_width, config),
            described_rows("OUT", out, CONSUMER_ROWS, tiles.out_width, config),
        )
        if gathers(form):
            described |= dict.fromkeys("KV", f"*{signature_type(form.dtype)}")
        return (*ragged_arguments(form, config, described), *ragged.cache_sizes(form))
    counts = config.tile_scheduler == "dynamic"
    sizes = (Argument("num_work_tiles", "i32"), *(Argument("COUNTER", "*i32", 4),) * counts)
    return attention_arguments(structure, config, described, sizes=sizes)


def consumer_arguments(
    found: tuple[Argument, ...], work_tile_in_smem: bool, fp8: bool, factors_in_smem: bool
) -> list[str]:
    """The arguments that the kernel hands to the consumers beside the output and shared memory.

    work_tile_in_smem: the producer writes their work tile into shared memory. factors_in_smem: and
    a head's factors, which of fp8 they read otherwise.
    """
    scheduler = ("num_",) if fp8 and not factors_in_smem else ("num_", "group")
    left = ("OUT", *_LOADED, *_LISTS, *scheduler * work_tile_in_smem, "stride_o")
    left += _FACTORS * factors_in_smem
    return [
        argument.name
        for argument in found
        if argument.type[0] != "t" and not argument.name.startswith(left)
    ]


def producer_arguments(
    found: tuple[Argument, ...], masked: bool, factors_in_smem: bool
) -> list[str]:
    """The arguments that the kernel hands to the producer beside descriptors and shared memory.

    masked: it computes something of the mask_mod.
    """
    captured = ("mask_buf", "mask_scalar") if masked else ()
    taken = (*_LISTS, *_LOCATION, "stride_kb", "q_len", "kv_len", *captured)
    taken += _FACTORS * factors_in_smem
    return [argument.name for argument in found if argument.name.startswith(taken)]


HOPPER = gluon_dialect(
    "MMA_S", diagonal=TensorForm("[STRIP]", "BLOCKED_1D"), over_diagonals="BLOCKED_1D"
)
# Consumers read a request's keys behind the first tile's scores.
_OF_REQUESTS = HOPPER._replace(within="row_start >= 0")


def _dialect(structure: Structure) -> Dialect:
    return HOPPER if form_of(structure) is None else _OF_REQUESTS


def print_consumer_score(
    structure: Structure,
    traits: Traits,
    lazy_rescale: bool,
    tile: tuple[int, int] | None = None,
) -> PrintedScore:
    """The score_mod of a structure that has one, each consumer's rows for themselves.

    lazy_rescale: the softmax is the one that does what it can of it by itself. tile: a consumer's
    rows and keys, where they begin at multiples of both.
    """
    traits = traits._replace(dialect=_dialect(structure))
    found = triton_score(structure, traits, fuses=lazy_rescale, tile=tile)
    return found._replace(limits=None)


_TEMPLATE = "hopper/prefill.py.jinja"
# What the producer fills, and tells that it is full.
_TILES = "k_tiles, v_tiles, q_full, k_full, v_full"
_WIDENED_TILES = "narrow_k, narrow_v, q_full, narrow_full, narrow_more"
# By its module: see kernels/ptx/stages.py.
PASS = "hopper.merge_consumers"
# One for each stage of K, of V and of Q, and for each consumer's turn on the tensor cores.
_HARDWARE_BARRIERS = 16
# Registers that one piece of assembly multiplies.
MOST_RESCALED = 64
_THREADS = 32 * CONSUMER_WARPS
# Weights of a thread's tile whose exp2 is taken before the wait for the P V of the tile before.
EARLY_EXP2 = 32
# Weights of e4m3, whose largest number is 448, are 2^MAX_OFFSET larger than those of a maximum of
# 1: what is below 2^-18 of it is lost, not 2^-10.
MAX_OFFSET = 8.0
# By how much a maximum may rise before its row is scaled anew: weights are at most 431, 2^8.75.
# Normal scores are then scaled half as often; the error is that of one rounding still.
MAX_RISE = 0.75
# tanh by a polynomial, where scores are capped: exponentials fill the MUFU.
# tanh(x) = x * (c0 + c1 u) of u = x * x up to LIMIT: scores up to 0.4 of their cap. Fitted by
# reweighted least squares; the relative error is below that of the hardware's instruction, 2^-11.
COEFFICIENTS = (0.99960171, -0.31317268)
LIMIT = 0.16
# Registers that a soft cap by halves needs beside those that are counted.
LEAST_SPARE_REGISTERS = 8


class _Part(NamedTuple):
    """cut: what follows a tile's name. held: Q's part in registers, "" where it is not there."""

    cut: str
    held: str


class _Chunk(NamedTuple):
    """One copy of Q or K, and what wgmma multiplies of it.

    of_part: which of K's parts it belongs to; k_part: the same of a part's first copy, else None.
    """

    start: int
    width: int
    parts: tuple[_Part, ...]
    of_part: int
    k_part: int | None


def render(
    structure: Structure, config: HopperPrefillConfig, device: Device, title: str
) -> Source:
    """The Hopper prefill kernel of a structure with a config; title goes into its header."""
    tiles = tiles_of(structure, config)
    found = arguments(structure, config)
    traits = traits_of(device, structure)
    # A maximum that is returned is exact.
    lazy = config.lazy_rescale and not structure.max_scores
    form = form_of(structure)
    # Rows of requests begin at any position, and several may be of one.
    tile = (CONSUMER_ROWS, config.BLOCK_N) if form is None else None
    score = None
    if structure.score is not None:
        score = print_consumer_score(structure, traits, lazy, tile)
    mask = None
    if structure.mask is not None:
        positions = "ROWS" if form is None else "TOKENS"
        mask = print_mask(
            structure.mask, traits._replace(dialect=_dialect(structure)), tile, positions
        )
    mods = printed_context((score, mask), device, HOPPER)
    sparsity = structure.sparsity
    # In a tile that no block's rows divide, each consumer has runs of its own. For requests the
    # producer computes a range of keys from the bounds of the mask.
    runs = (
        touched_runs(structure, config, config.consumers)
        if form is None
        else int(mask is not None)
    )
    persistent = config.persistent
    case = case_of(config, structure, device)
    separate_o_smem, q_stages = case.own_output, case.q_slots
    decay_skip = form is None and skips_far(structure, config)
    request_words: tuple[str, ...] = ()
    if form is not None:
        request_words = ragged.REQUEST_WORDS[: 3 + config.splits]
        request_words += ragged.GAP_WORDS * ragged.has_gap(form)
    work_tile_in_smem = persistent or sparsity is not None or decay_skip
    widened = ragged.widens(structure)
    gathered = form is not None and gathers(form)
    # One asks the copy engine for tiles; copies of 16 bytes fill four.
    producer_warps = CONSUMER_WARPS if gathered else 1
    product = structure.out_dtype if form is None else form.product_dtype
    # Consumers with a head each read their own.
    factors_in_smem: bool = (
        structure.fp8 and work_tile_in_smem and form is None and not config.pack_gqa
    )
    # At 64 columns without a mask consumers that read them are 2 % faster (H200).
    factors_in_smem &= sparsity is not None or tiles.v_width > 64
    fold_scale = structure.positive_scale if score is None else score.folded
    narrowed = tiles.v_columns < tiles.v_width
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "ROWS": CONSUMER_ROWS,
        "WARPS": CONSUMER_WARPS,
        "CONSUMERS": config.consumers,
        "STAGES": config.num_stages,
        "Q_SLOTS": q_stages,
        "K_PARTS": config.k_parts,
        "V_PARTS": config.v_parts,
        "HEAD_DIM_QK": tiles.qk_padded,
        "HEAD_DIM_V": tiles.v_width,
        "V_TYPE": HOPPER.type(product),
    }
    if sparsity is not None:
        settings |= {
            "SPARSE_Q": sparsity.q_block,
            "SPARSE_KV": sparsity.kv_block,
            "TILES_PER_KV": sparsity.kv_block // config.BLOCK_N,
        }
    if form is not None:
        settings |= ragged.constants(form, config, device)
    if decay_skip:
        settings["ALL_KEYS"] = float(ALL_KEYS)
    if score is not None and score.strip:
        settings["STRIP"] = 1 << (CONSUMER_ROWS + config.BLOCK_N - 1).bit_length()
    if structure.e4m3_weights:
        settings |= {"MAX_OFFSET": MAX_OFFSET, "UNRAISED": 2.0**-MAX_OFFSET}
    if tiles.out_chunks > 1:
        settings["OUT_WIDTH"] = tiles.out_width
    if config.v_box:
        settings |= {"V_BOX": tiles.v_box, "V_BOXES": tiles.v_boxes, "V_COLUMNS": tiles.v_columns}
    if form is None:
        settings |= {"HEADS": config.heads, "ORDER": repr(config.order)}
    settings["L2_SWIZZLE"] = max(1, config.l2_swizzle // config.heads)
    v_empty = _HARDWARE_BARRIERS - config.num_stages
    k_empty = v_empty - config.num_stages * config.k_parts
    q_empty = k_empty - q_stages
    settings |= {"V_EMPTY": v_empty, "K_EMPTY": k_empty, "Q_EMPTY": q_empty}
    if widened:
        turns = config.consumers * config.ping_pong
        settings["NARROW_EMPTY"] = q_empty - turns - ragged.NARROW_HALVES
    # Consumers with runs of their own end a work tile at different KV tiles, and q_in_regs holds
    # the Q of one work tile. Across work tiles the first V is waited for before the first K is
    # released: with one stage it would not come.
    pipelined = config.cross_tile_pipeline and q_stages > 1 and runs < 2 and config.num_stages > 1
    pipelined = pipelined and tiles.v_width <= 128 and not config.q_in_regs and form is None
    # What a mod reads for each row of a work tile costs 14 % where it is loaded during the one
    # before (8 documents, 8k, H200).
    by_row = any("gl.load(" in line and "q_idx" in line for line in mods["hoisted"])
    per_thread = CONSUMER_ROWS * config.BLOCK_N // _THREADS
    strip = int(str(settings.get("STRIP", 0)))
    by_key = mask is not None and mask.exchanged != ()
    exchange_width = max(strip, config.BLOCK_N if by_key else 0)
    half = "bf16" if product == "bfloat16" else "f16"
    fused = "" if score is None else score.fused
    # Beside 128 columns two consumers have registers left for exponents during P V.
    wide = lazy and config.consumers == 2 and tiles.qk_padded == tiles.v_width == per_thread * 2
    early_exp2 = EARLY_EXP2 if score is None or fused == "blocks" else EARLY_EXP2 // 2
    if not wide or fused == "softcap" or structure.e4m3_weights:
        early_exp2 = 0
    # A soft cap's exponents all at once where registers are left for them beside the scores, by
    # quarters where none are.
    parts = 1 if wide and not config.splits and (mask is None or not mask.holds) else 2
    if config.consumer_regs - case.registers < LEAST_SPARE_REGISTERS:
        parts = 4
    chunks = _chunks(tiles, config)
    context = {
        **mods,
        "config": config,
        "structure": structure,
        "tiles": tiles,
        "case": case,
        # Knobs that this structure or another one may rule out.
        "lazy_rescale": lazy,
        # A value for each score would take registers before the scores are there.
        "early_loads": not case.loads_tile,
        "cross_tile_pipeline": pipelined,
        "ping_pong_softmax": config.ping_pong_softmax and not pipelined,
        # Scores of fp8 depend on factors of the heads.
        "hoists_early": pipelined
        and (score is not None or mask is not None)
        and not (by_row or structure.fp8),
        "score": score,
        "mask": mask,
        "constants": settings | BASE_2,
        "qk_chunks": chunks,
        "wide": tiles.qk_padded > WIDEST,
        # Behind each part of K how many groups of products of the same scores are issued.
        "unreleased": [
            sum(len(each.parts) for each in chunks if each.of_part > part)
            for part in range(config.k_parts)
        ],
        "narrow_pv": narrowed and from_registers(tiles.v_columns, tiles.v_width),
        "has_full": sparsity is not None and sparsity.has_full,
        "q_released_early": persistent and separate_o_smem and not pipelined,
        "barrier_threads": 128 * config.consumers + 32 * producer_warps,
        "warp_scheduler_barrier": q_empty - config.consumers,
        "skip_sync_mark": merge_consumers.ALONE,
        "announcement": merge_consumers.announcement(config.consumers, config.consumer_regs),
        "work_tile_in_smem": work_tile_in_smem,
        "exchange_width": exchange_width,
        "sizes": [2 << i for i in range((config.BLOCK_N // 8).bit_length() - 1)],
        "listed": sparsity is not None and not runs,
        "runs": runs,
        "ragged": form is not None,
        "paged": form is not None and form.page > 0,
        # Else stages hold whole boxes of a tile.
        "page_boxes": form is not None and form.page > 0 and not (widened or gathered),
        "gathered": gathered,
        "producer_warps": producer_warps,
        "widened": widened,
        "scaled": form is not None and form.scaled,
        "out_type": HOPPER.type(structure.out_dtype) if widened else "V_TYPE",
        "producer_tiles": _WIDENED_TILES if widened else _TILES,
        # With one place for Q the producer waits anyway.
        "early_number": form is not None and form.ragged_kv and q_stages > 1,
        "splits": config.splits,
        "may_be_empty": sparsity is not None or form is not None,
        "work_tile_words": 5 + 4 * runs + len(request_words),
        "request_words": request_words,
        "decay_skip": decay_skip,
        "keys_aligned": keys_aligned(structure, config.BLOCK_N),
        "fused": fused,
        "scale_halves": score is not None and score.folded and score.halves,
        # A mask comes after what is added to scores: NaN or inf there would outlive its -inf.
        "exponents_early": fused != "" or wide,
        "early_exp2": early_exp2,
        "parts": parts,
        "out": per_thread * (2 if early_exp2 else 1),
        "coefficients": COEFFICIENTS,
        "limit": LIMIT,
        "float_bits": float_bits,
        "rescale_first": tiles.v_width > 128 and not lazy,
        "per_thread": per_thread,
        "rescaled": min(MOST_RESCALED, CONSUMER_ROWS * tiles.v_width // _THREADS),
        "half": half,
        "fold_scale": fold_scale,
        "v_itemsize": ITEMSIZE[structure.value_dtype],
        "max_offset": MAX_OFFSET,
        "max_rise": MAX_RISE,
        "far": structure.far or structure.sinks != "",
        "factors_in_smem": factors_in_smem,
        # What each output row is multiplied by beside 1 / l_i.
        "row_factors": [
            name
            for name, used in (
                ("keep", structure.sinks != ""),
                ("v_descale", structure.fp8 or (form is not None and form.scaled)),
                ("keep_scale", structure.dropout),
            )
            if used
        ],
        "consumer_arguments": consumer_arguments(
            found, work_tile_in_smem, structure.fp8, factors_in_smem
        ),
        "producer_arguments": producer_arguments(
            found, decay_skip and mask is not None and mask.under is not None, factors_in_smem
        ),
    }
    if form is not None:
        context |= ragged.ragged_context(form, found, traits._replace(dialect=HOPPER))
    header = [title, f"config: {describe(config)}", *expressions(structure)]
    passes = (PASS,) if config.merges else ()
    if narrowed:
        passes = (*passes, NARROW_PRODUCTS)
    ptxas = effective(config.ptxas)
    if config.v_box and not ptxas and (ptxas := for_split_tiles()):
        header.append(f"assembled by {ptxas}: ptxas 12.8 makes wrong code of it")
    return make_source(
        _TEMPLATE,
        device,
        header,
        context,
        found,
        CONSUMER_WARPS,
        config.num_stages,
        "gluon",
        registers=TWO_BLOCKS_THREAD if config.per_sm > 1 else 0,
        stages=Stages(passes, ptxas),
    )


def render_wide_values(head_dim: int, device: Device) -> Source:
    """The kernel that makes V [B, heads, kv_len, head_dim] of e4m3 bfloat16: V_KEYS, dense."""
    found = [Argument("V", "*fp8e4nv", 16), Argument("V_KEYS", "*bf16", 16)]
    found += stride_arguments("v", "bhn", 16)
    found += several("i32", "heads", "kv_len", "num_tiles")
    return _values_source(
        "hopper/widen_v.py.jinja", f"wide V of {head_dim}", found, head_dim, device
    )


def render_transposed_values(head_dim: int, device: Device) -> Source:
    """The kernel that lays V [B, heads, kv_len, head_dim] of 8 bits out for weights of 8 bits.

    V_KEYS [B, heads, head_dim, width], dense, width kv_len's next multiple of PERMUTED_KEYS.
    """
    found = [Argument("V", "*u8", 16), Argument("V_KEYS", "*u8", 16)]
    found += [*stride_arguments("v", "bhn", 16), *several("i32", "heads", "kv_len")]
    found += [Argument("width", "i64", PERMUTED_KEYS), Argument("num_tiles", "i32")]
    title = f"transposed V of {head_dim}"
    return _values_source("hopper/transpose_v.py.jinja", title, found, head_dim, device)


def _values_source(
    template: str, title: str, found: list[Argument], head_dim: int, device: Device
) -> Source:
    settings = {
        "BLOCK_N": TRANSPOSED_KEYS,
        "HEAD_DIM_V": head_dim,
        "TILE_D": power_above(head_dim),
    }
    header = [f"{title} for {device.arch}"]
    context = {"constants": settings}
    return make_source(template, device, header, context, found)


def _chunks(tiles: Tiles, config: HopperPrefillConfig) -> list[_Chunk]:
    """The copies of Q and K, in order; the first q_in_regs columns of Q are in registers."""
    copies = tiles.qk_chunks // config.k_parts
    found, held = [], 0
    for i, parts in enumerate(tiles.qk_parts):
        start, made = i * tiles.qk_width, []
        held_here = config.q_in_regs - start
        if not config.v_box and 0 < held_here < tiles.qk_width:
            parts = ((0, held_here), (held_here, tiles.qk_width - held_here))
        for first, width in parts:
            cut = f".slice({first}, {width}, dim=1)" if width < tiles.qk_width else ""
            is_held = start + first + width <= config.q_in_regs
            made.append(_Part(cut, f"q_regs[{held}]" if is_held else ""))
            held += is_held
        opened = None if i % copies else i // copies
        found.append(_Chunk(start, tiles.qk_width, tuple(made), i // copies, opened))
    return found


def float_bits(number: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", number).hex().upper()
