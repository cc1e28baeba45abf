"""Render the serving kernels: the one over the batch, and the one that merges partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base import source as rendering
from flexattn.kernels.base.arguments import Argument, captured_arguments, several
from flexattn.kernels.base.config import pieces
from flexattn.kernels.base.source import BASE_2, Source
from flexattn.kernels.paged_decode import engines
from flexattn.kernels.paged_decode.config import (
    COMBINE_WARPS,
    LINE,
    ServingConfig,
    least_tile,
    merge_shape,
)
from flexattn.kernels.paged_decode.reads import (
    located,
    predicated_loads,
    prefetched,
    reads_last_keys,
    request_sizes,
    scale_arguments,
    scale_constants,
    scale_context,
)
from flexattn.kernels.printers.mask_printer import (
    MaskParts,
    print_key_bounds,
    whole_mask,
)
from flexattn.kernels.printers.score_printer import PrintedScore, whole_score
from flexattn.kernels.printers.spelling import TRITON, Dialect, signature_type, triton_type
from flexattn.kernels.printers.triton_printer import Traits
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Captures
from flexattn.problem.serving import ServingForm


def tied(form: ServingForm) -> bool:
    """True if the tile of V is the first tile of K, so that it is read once."""
    if not form.shared_kv:
        return False
    k, v = (pieces(dim, least_tile(form)) for dim in (form.head_dim_qk, form.head_dim_v))
    return len(v) == 1 and v[0][1] == k[0][1]


def stepped_axes(form: ServingForm, described: bool) -> str:
    """Pages or requests, keys and heads, of which a kernel is told the strides of the cache.

    A descriptor has them, but none of 0: a request whose keys are those of all is asked for.
    """
    if not described:
        return "pnh"
    return "" if form.page else "p"


def serving_arguments(form: ServingForm, config: ServingConfig) -> tuple[Argument, ...]:
    """Arguments of the serving kernel, in order; None of them depends on a length."""
    described, gathers = config.boxed(form), config.gathers(form)
    q, kv = signature_type(form.dtype), signature_type(form.kv_dtype)
    wide = 16 if form.aligned else 1
    found = [Argument("Q", f"*{q}", wide)]
    for name in "K" if tied(form) else "KV":
        found.append(
            engines.described(form, name) if described else Argument(name, f"*{kv}", wide)
        )
    found += [*_written(form), *_described(form)]
    if form.page:
        found.append(Argument("TABLE", "*i32", 4))
    if form.unit:
        names = (*("LISTED", "LISTED_NUM") * (not config.sifts(form)), *("INDICES",) * gathers)
        found += several("*i32", *names, divisible_by=4)
    if form.prefix:
        found.append(Argument("ROW_LENS", "*i32", 4))
    if form.scaled:
        found.append(Argument("K_SCALE", "*fp32", 4))
    found += scale_arguments(form)
    q_step = 16 // form.itemsize if form.aligned else 1
    kv_step = 16 // form.kv_itemsize if form.aligned else 1
    found += [Argument(f"stride_q{axis}", "u32", q_step) for axis in "mh"]
    for tensor in "k" if tied(form) else "kv":
        axes = stepped_axes(form, described)
        found += [Argument(f"stride_{tensor}{axis}", "u32", kv_step) for axis in axes]
    if form.page:
        found += several("i32", "stride_table", "num_pages")
    if form.prefix:
        found.append(Argument("q_len_each", "i32"))
    found.append(Argument("softmax_scale", "fp32"))
    if form.split_keys:
        found.append(Argument("part_slots", "i32"))
    return (*found, *captured_arguments(form.score, form.mask))


def render_serving(form: ServingForm, config: ServingConfig, device: Device, title: str) -> Source:
    """The kernel of a form with a config for a device; title goes into its header."""
    dialect = engines.dialect(config)
    traits = _traits(form, device, dialect)
    score = None if form.score is None else whole_score(form.score, traits)
    mask = _printed(form.mask, form, traits)
    late = not (form.prefix or form.unit) and form.mask is not None and reads_last_keys(form.mask)
    # In PTX, or as the interpreter reads.
    if late and dialect is TRITON and device.backend != "hip":
        mask = _printed(form.mask, form, traits._replace(predicated_loads=True))
    qk, v = (
        rendering.named_pieces(name, dim, least=least_tile(form))
        for name, dim in (("qk", form.head_dim_qk), ("v", form.head_dim_v))
    )
    eight = form.kv_itemsize == 1
    product = triton_type(form.product_dtype)
    of_pages = form.page > 0 and config.BLOCK_N % form.page == 0 and not form.unit
    context = {
        **_shared(form, config, device, (score, mask), dialect, config.num_warps),
        "score": score,
        "mask": mask,
        "qk_pieces": qk,
        "v_pieces": v,
        "all_pieces": (*qk, *v),
        "layout": _CONTIGUOUS,
        "use_tma": False,
        # Kept in registers, what does not change would leave a warpgroup's tile too few.
        "licm": config.BLOCK_M < 64,
        "fold_scale": score is None and form.positive_scale and not form.scaled,
        "element": product,
        "upcast": device.backend == "interpreter" and form.product_dtype == "bfloat16",
        "precision": "ieee" if form.dtype == "float32" else "",
        "tied": tied(form),
        "widen": engines.PTX_EIGHT_BITS.get(form.kv_dtype, "") if not config.warp_private else "",
        "widen_by_hand": device.capability >= 89,
        "q_cast": f".to({product})" if eight and form.dtype != form.product_dtype else "",
        "page_of_tile": form.page > 0 and not form.unit and form.page % config.BLOCK_N == 0,
        "tile_of_pages": of_pages,
        "pages_in_tile": of_pages,
        "k_whole": of_pages and not tied(form),
        # Tall tiles have no registers for what the loop can compute again.
        "row_offsets_hoisted": config.BLOCK_M < 64 and (of_pages or not (form.page or form.unit)),
        "launch_pdl": config.dependent and device.backend == "cuda",
        "late_sum": config.BLOCK_M <= 32,
        # A warp of its own reads in the layout of its scores, and has its next tile in registers.
        "mask_apart": late and config.warp_private,
        "predicated_loads": () if mask is None else predicated_loads(mask),
        "prefetch": device.backend == "cuda",
        "prefetched": (*prefetched(form.score), *prefetched(form.mask)),
    }
    context |= engines.context(form, config)
    header = [title, f"config: {describe_serving(config)}"]
    for name, captures in (("score_mod", form.score), ("mask_mod", form.mask)):
        if captures is not None:
            header.append(f"{name}: {rendering.expression_line(captures)}")
    found = serving_arguments(form, config)
    interpreted = config.warp_private and device.backend == "interpreter"
    # Of the first warpgroup's warps, which start the others, where a warp loads by TMA.
    most = engines.first_registers(form, config)
    source = rendering.make_source(
        f"paged_decode/{config.template}.py.jinja", device, header, context, found,
        4 if config.by_tma else config.num_warps,
        config.num_stages if config.template == "program" else 1,
        "triton" if interpreted else config.language,
        most if config.by_tma else config.registers(form, device),
    )  # fmt: skip
    unfused = config.warp_private and form.split_keys > 0
    return rendering.hinted(source, rendering.UNFUSED if unfused else ())


def render_serving_combine(form: ServingForm, config: ServingConfig, device: Device) -> Source:
    """The kernel that merges, where the config asks for one."""
    shape = merge_shape(form, config, device)
    mask = _printed(form.mask, form, _traits(form, device, TRITON))
    context = {
        **_shared(form, config, device, (mask,), TRITON, COMBINE_WARPS),
        "v_pieces": rendering.named_pieces("v", form.head_dim_v // shape.column_parts),
        "by_work_tile": shape.work_tiles > 0,
        "turns": shape.turns,
        "rehearsed": shape.rehearsed,
        "launch_pdl": config.dependent and device.backend == "cuda",
        "widen": "",
        "prefetch": False,
        "predicated_loads": (),
    }
    context["constants"] |= {"ROW_PARTS": shape.row_parts}
    if shape.work_tiles:
        context["constants"] |= {"COLUMN_PARTS": shape.column_parts}
    most = 128 if shape.rehearsed else 0  # two begin beside a program of the serving kernel
    if config.warp_specialized:
        most = engines.merge_registers(form, config, device)
    title = f"serving combine {form.dtype} D={form.head_dim_v} for {device.arch}"
    return rendering.make_source(
        "paged_decode/combine.py.jinja",
        device,
        [title],
        context,
        (*_written(form), *_described(form), *captured_arguments(form.mask)),
        COMBINE_WARPS,
        registers=most,
    )


def describe_serving(config: ServingConfig) -> str:
    """Names and numbers in one line."""
    return " ".join(f"{field.name}={getattr(config, field.name)}" for field in fields(config))


_CONTIGUOUS = {"q_contiguous": True, "k_contiguous": True, "v_contiguous": True}


def _written(form: ServingForm) -> list[Argument]:
    """The arguments that both kernels write, and those that one of them leaves to the other."""
    found = [Argument("OUT", f"*{signature_type(form.out_dtype)}", 16)]
    if form.lse:
        found.append(Argument("LSE", "*fp32", 4))
    found += [Argument("WORKSPACE", "*fp32", 16), Argument("COUNT", "*i32", 16)]
    if form.sinks:
        found.append(Argument("SINKS", "*fp32", 4))
    if form.scaled:
        found += [Argument("V_SCALE", "*fp32", 4), Argument("stride_scale", "i32")]
    return [*found, Argument("stride_om", "i32", math.gcd(16, form.head_dim_v))]


def _described(form: ServingForm) -> list[Argument]:
    """The arguments by which both kernels cut the batch."""
    found = [Argument("SEQ_LENS", "*i32", 4)]
    if form.offset:
        found.append(Argument("KV_START", "*i32", 4))
    if form.ragged:
        found.append(Argument("CU_SEQLENS", "*i32", 4))
    if form.phase:
        found.append(Argument("PREFILLS", "*i32", 4))
    numbers = ["num_requests", "total_q" if form.ragged else "q_rows", "max_keys"]
    return found + several("i32", *numbers)


def _shared(
    form: ServingForm,
    config: ServingConfig,
    device: Device,
    printed: Sequence[MaskParts | PrintedScore | None],
    dialect: Dialect,
    num_warps: int,
) -> dict[str, Any]:
    """The variables of the templates of both kernels."""
    traits = _traits(form, device, dialect, rowwise=False)
    found, free, _ = print_key_bounds(None if form.prefix else form.mask, traits)
    free = None if form.unit else free
    captures = [argument.name for argument in captured_arguments(form.mask)]
    captured = captures if found else []
    names = [each.name for each in _described(form)]
    merged = merge_shape(form, config, device)
    slots = config.programs(device) * config.left * config.BLOCK_M
    settings: dict[str, float] = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "PACKED": form.group,
        "HEAD_DIM_V": form.head_dim_v,
        "PAGE": form.page,
        "HEADS": form.kv_heads,
        "PROGRAMS": config.programs(device),
        **request_sizes(form, device, num_warps, dialect.gluon),
        "LEAST": config.least,
        "WEIGHTS": slots * form.head_dim_v,
        "MERGE_ROWS": merged.rows,
        "MERGE_PARTS": merged.parts,
        "LANES": 32 * config.num_warps,
        "Q_LINES": -(-form.head_dim_qk * form.itemsize // LINE),
        "Q_LINE": LINE // form.itemsize,
    }
    settings |= engines.sizes(form, config, device) | scale_constants(form)
    if form.unit:
        settings |= {"UNIT": form.unit, "MOST_CHOSEN": form.chosen}
    if form.split_keys:
        settings |= {
            "SPLIT_KEYS": form.split_keys,
            "TILES_PER_SPLIT": form.split_keys // config.BLOCK_N,
        }

    def span_values(*values: str) -> str:
        return ", ".join((*values, *captured))

    return {
        **rendering.printed_context(printed, device, dialect),
        "jit": "triton.jit",
        "config": config,
        "form": form,
        # What a batch's work is counted in.
        "unit": "SPLIT_KEYS" if form.split_keys else "BLOCK_N",
        "one_work_tile": config.warp_private and 0 < form.rows <= config.BLOCK_M,
        "by_lane": "",
        "prefetched_before": False,
        "by_request": "",
        "constants": settings | BASE_2,
        "edges": found,
        # Of tall tiles ptxas spills the loop's addresses where this comparison is left out.
        "bounded_below": config.BLOCK_M >= 64 or any(edge.lowest for edge in found),
        "located": located(form),
        "loaded": located(form)[2:],
        "warp_copies": "LOADERS" in settings,
        "free_edges": free,
        "free_arguments": ["b", "q_first", "q_last", "first_key", "kv_len", *captures],
        "request_arguments": ["b", *names],
        "request_values": lambda b: ", ".join((b, *names)),
        "span_arguments": ["b", "q_first", "q_last", "first_key", "kv_len", *captured],
        "span_values": span_values,
        "out_element": triton_type(form.out_dtype),
        "part_element": triton_type("float16") if config.short_parts(form) else "",
        **scale_context(form),
    }


def _traits(form: ServingForm, device: Device, dialect: Dialect, rowwise: bool = True) -> Traits:
    return Traits(
        head_per_row=rowwise,
        batch_per_row=rowwise and form.prefix,
        interpreted=device.backend == "interpreter",
        fast_tanh=device.has_tanh and form.out_dtype == "bfloat16",
        short_tanh=form.out_dtype in ("bfloat16", "float16"),
        dialect=dialect,
    )


def _printed(captures: Captures | None, form: ServingForm, traits: Traits) -> MaskParts | None:
    if captures is None:
        return None
    needed = "i < end"
    if (
        not (form.prefix or form.unit)
        and mask_form(captures.mod.expr, INDEX_RANGES).free_edges is not None
    ):
        needed = "(start_n < free_low) | (start_n + BLOCK_N > free_high)"
    if traits.predicated_loads:
        # Nothing but its end bounds what is free, so no tile begins before it.
        needed = "start_n + BLOCK_N > free_high"
    return whole_mask(captures, traits, needed)
