"""Rows of requests, keys in pages or of packed sequences: parts of Hopper's forward for plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flexattn.device import Device
from flexattn.kernels.base import ragged as base
from flexattn.kernels.base.arguments import (
    Argument,
    captured_arguments,
    several,
    sinks,
)
from flexattn.kernels.base.features import loads_diagonals
from flexattn.kernels.base.ragged import (
    TILE_WORDS,
    form_of,
    gathers,
    packed_heads,
    packs,
    prefill_rows,
    request_arguments,
)
from flexattn.kernels.base.source import (
    BASE_2,
    Source,
    make_source,
    mod_context,
    named_pieces,
    traits_of,
)
from flexattn.kernels.hopper.config import (
    BOX,
    BOXED_REGISTERS,
    CONSUMER_REGISTERS,
    CONSUMER_ROWS,
    GATHERING_REGISTERS,
    PARTS_OF_SHARE,
    HopperPrefillConfig,
    RaggedPrefillConfig,
    grid,
    split_slots,
)
from flexattn.kernels.printers.mask_printer import print_key_bounds
from flexattn.kernels.printers.spelling import signature_type, triton_type
from flexattn.kernels.printers.triton_printer import Traits
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Structure
from flexattn.problem.serving import (
    DECODE_QUERIES,
    ServingForm,
    ServingProblem,
)

# Tiles that a program ranks at a time, and requests that it compares them with.
_TILES = _REQUESTS = 64
# Packed rows of a tile of the streaming kernel, and its time by that of a tile of this one: 2,048
# rows of 16k keys take it 2.75 times as long (an H200).
_STREAMED_ROWS, _STREAMED_TIME = 64, 1.35
# Rows of a mean sequence, of the heads that share tiles, from which three consumers are faster up
# to 64 columns: their tiles are a fifth faster (an H200), and fill less of shorter ones.
_LONG = 700
# This kernel serves the decodes beside prefills, too, where they have up to so many tiles of keys
# for each SM, or by the other number of those that the streaming kernel would have: in one kernel
# 64 decodes of 4k beside 1,984 rows of 8k take 569 us, in two 655 (an H200).
_LIGHT, _JOINED = 8, 1.5
# The time of an SM for a tile of keys that it streams, by that of one that it multiplies, and the
# share of all SMs whose streams take the memory's whole bandwidth. An SM reads up to 75 GB/s.
_STREAMED_ON_SM, _STREAMING = 0.6, 0.43
# Query heads of a section, of several requests: a section would end with short tiles, and the next
# one begin with the longest.
_SECTION = 64
# A tile of rows that has more tiles of keys than this share of an SM's, and so many more, is cut:
# into parts of half of an SM's share, each of this many tiles of keys at least. A merge of parts
# takes the time of some 8 tiles.
_CUT_FROM, _CUT_COST, _LEAST_PART, _MOST_PARTS = 1.0, 8, 6, 64
# Rows and parts that a program merges at a time.
_MERGE_ROWS, _MERGE_PARTS = 8, 4
# Numbers of a tile that is cut, at most, and what the producer tells consumers of it.
CUT_WORDS = 5
REQUEST_WORDS = ("kv_len", "out_row", "rows_left", "slot")
GAP_WORDS = ("gap_end", "gap")
# What the producer alone reads, beside the tensors of K and V.
_PRODUCED = ("group", "COUNTER")
# Rows of a tile of eight bits that a warp widens at a time, and halves of K's tile and V's.
_WIDENED_ROWS, NARROW_HALVES = 32, 4
# Keys of tiles that are no pages' boxes that are cleared at a time behind the last one.
_CLEARED_ROWS = 16
# Elements of 16 bits in one copy by cp.async.
_COPY = 8


def widens(structure: Structure) -> bool:
    """True if K and V have eight bits, which warps of their own widen to float16."""
    form = form_of(structure)
    return form is not None and form.kv_itemsize == 1


def narrow_bytes(structure: Structure, config: HopperPrefillConfig) -> int:
    """Bytes of shared memory that tiles of eight bits take beside those of sixteen."""
    boxes = -(-structure.head_dim_qk // BOX) + -(-structure.head_dim_v // BOX)
    return config.BLOCK_N * BOX * boxes if widens(structure) else 0


def has_gap(form: ServingForm) -> bool:
    """True if the loop over keys leaves out those between a mask's first keys and its window.

    Where four warps copy keys, they find the pages of the next tile before it is known which.
    """
    known = form.mask is not None and mask_form(form.mask.mod.expr, INDEX_RANGES).gap_edges
    return bool(known) and not gathers(form)


def unserved(form: ServingForm, config: HopperPrefillConfig) -> str:
    """The part of a plan that the kernel does not have, in words; "" if it has everything."""
    asked = base.lacks(form, config) | {
        # Four warps that copy them meet at a hardware barrier that would be a third consumer's.
        f"pages of {form.page}": gathers(form) and (widens(form) or config.consumers > 2),
        "scales of 16 bits": form.scaled and not widens(form),
        "packed sequences of eight bits": form.ragged_kv and widens(form),
        "queries of eight bits": form.itemsize == 1,
        # Pages are copied in boxes, and the device lists the tiles of rows.
        "a v_box other than 64": config.v_box != BOX,
        "an order of tiles other than sections": config.order != "sections",
        "a tile_scheduler other than dynamic": config.tile_scheduler != "dynamic",
        "a cross_tile_pipeline": config.cross_tile_pipeline,
        "packed_heads beside pack_gqa": config.packed_heads > 1 and config.pack_gqa,
        "tiles of less than 64 keys of eight bits": config.BLOCK_N < 64 and widens(form),
    }
    return next((what for what, holds in asked.items() if holds), "")


def ragged_defaults(problem: ServingProblem, device: Device) -> Iterator[RaggedPrefillConfig]:
    """The static defaults, best first; not all of them can run.

    Keys are cut if they may make two parts, unless one request's rows alone, or those of packed
    sequences, occupy all SMs.
    """
    form, rows = problem.structure, problem.rows // problem.B
    widest = max(form.head_dim_qk, form.head_dim_v)
    two = RaggedPrefillConfig(
        2, 128 if widest <= 128 else 64, 2, BOXED_REGISTERS, ping_pong=True,
        tile_scheduler="dynamic", order="sections", lazy_rescale=True, cross_tile_pipeline=False,
        v_box=BOX,
    )  # fmt: skip
    if form.ragged_kv and widest <= 64 and form.score is None and packs(form):
        three = replace(two, consumers=3, num_stages=3, consumer_regs=CONSUMER_REGISTERS[3])
        found = _shared_out(three, problem, device)
        if rows * found.packed_heads >= _LONG:
            yield found
    first = _shared_out(two, problem, device)
    yield first
    yield replace(first, ping_pong=False)
    if form.ragged_kv:  # registers for what a score_mod reads
        yield _shared_out(replace(two, BLOCK_N=two.BLOCK_N // 2), problem, device)


def _shared_out(
    config: RaggedPrefillConfig, problem: ServingProblem, device: Device
) -> RaggedPrefillConfig:
    """The config with what follows from heads and mods, and whether keys are cut."""
    form = problem.structure
    if packs(form):
        rows = prefill_rows(problem)
        heads = packed_heads(rows, form.group, config.all_rows)
        shared = replace(config, packed_heads=heads)
        slices = replace(config, pack_gqa=True)
        able = form.group > 1 and not form.ragged_kv and slices.sliced(form.group)
        tiles = tiles_of_rows(form, slices, rows) if able else math.inf
        config = slices if tiles <= tiles_of_rows(form, shared, rows) else shared
    elif form.group % 2 == 0:
        config = replace(config, pack_gqa=True)
    terms = form.terms
    if config.BLOCK_N == 128 and terms is not None:
        # On an H200 2 to 3 % faster, but not with what diagonals share; a soft cap spills less.
        config = replace(config, ping_pong_softmax=terms.diagonal is None)
        # The warps that widen eight bits need 40 of the producer's.
        reads = not terms.linear or loads_diagonals(form)
        if reads and not widens(form) and form.head_dim_v > 64:
            config = replace(config, consumer_regs=CONSUMER_REGISTERS[2])
    if gathers(form) and not loads_diagonals(form):
        config = replace(config, consumer_regs=GATHERING_REGISTERS)
    units = grid(problem, config, device).num_work_tiles
    cut = problem.kv_len >= 2 * _LEAST_PART * config.BLOCK_N
    several_requests = problem.B > 1 and not form.ragged_kv
    if several_requests:
        config = replace(config, l2_swizzle=_SECTION)
    return replace(config, splits=cut and (several_requests or units < 2 * device.num_sms))


def tiles_of_rows(form: ServingForm, config: base.RaggedConfig, rows: int) -> int:
    """Tiles of so many query positions of a request, of all heads."""
    tiles, heads = -(-rows // config.BLOCK_M), form.kv_heads * config.head_tiles(form.group)
    if config.sliced(form.group):
        tiles = -(-tiles * form.group // config.heads)
    return tiles * heads


def box_rows(form: ServingForm, config: HopperPrefillConfig) -> int:
    """Keys of one box of K or V: a tile, or half of one of eight bits, or a page, or a part of one
    as long as that."""
    rows = config.BLOCK_N // (2 if widens(form) else 1)
    return min(form.page or rows, rows)


def cache_sizes(form: ServingForm) -> list[Argument]:
    """Pages and strides of a cache that is read by its address; plans refuse strides of 2**31."""
    if not gathers(form):
        return []
    names = [f"stride_{x}{axis}" for x in "kv" for axis in "pnh"]
    return [Argument("num_pages", "i32"), *several("i32", *names, divisible_by=_COPY)]


def constants(form: ServingForm, config: HopperPrefillConfig, device: Device) -> dict[str, object]:
    """Sizes of pages and of rows. WEIGHTS: where the log-sum-exps of parts begin."""
    rows = box_rows(form, config) if form.page in base.PAGES else _CLEARED_ROWS
    words = part_words(form, config, device)
    settings: dict[str, object] = {}
    if widens(form):
        settings = {"WIDENED": _WIDENED_ROWS, "HALF_PAGES": config.BLOCK_N // 2 // rows}
    return settings | base.row_constants(form, config, CONSUMER_ROWS, rows) | {
        "WEIGHTS": words // (form.head_dim_v + 1) * form.head_dim_v,
        "OUT_COLUMNS": form.head_dim_v,
    }  # fmt: skip


def cut_words(form: ServingForm, config: base.RaggedConfig) -> int:
    """Numbers of a tile that is cut; of slices one more, the first one's head."""
    return CUT_WORDS - (not config.sliced(form.group))


def part_words(form: ServingForm, config: HopperPrefillConfig, device: Device) -> int:
    """Numbers in float32 of the parts: rows of outputs, then their log-sum-exps in base 2."""
    heads = form.kv_heads * config.head_tiles(form.group)
    return split_slots(form, config, device) * heads * config.all_rows * (form.head_dim_v + 1)


def streaming_sms(device: Device) -> int:
    """SMs that the kernel of decodes may have for itself beside prefills."""
    return int(_STREAMING * device.num_sms)


def merge_programs(form: ServingForm, config: HopperPrefillConfig, device: Device) -> int:
    """Programs of the kernel that merges: a tile that is cut has two parts at least."""
    heads = form.kv_heads * config.head_tiles(form.group)
    return split_slots(form, config, device) // 2 * heads * (config.all_rows // _MERGE_ROWS)


def ragged_context(
    form: ServingForm, found: Sequence[Argument], traits: Traits
) -> dict[str, object]:
    """The variables of the templates that a call's kernel does not have."""
    context = base.request_context(form, traits, has_gap(form))
    listed = [each.name for each in request_arguments(form)]
    own = [*_PRODUCED, *(each.name for each in (*base.pages(form), *cache_sizes(form)))]
    read = ("K", "V", *own, *listed)
    captured: Any = context["range_captures"]
    return context | {
        "producer_arguments": ["Hq", *own, *listed, *captured],
        "consumer_arguments": [
            each.name for each in found if not each.described and each.name not in read
        ],
    }


def render_row_tiles(form: ServingForm, config: base.RaggedConfig, device: Device) -> Source:
    """The kernel that lists a batch's tiles of rows before attention, a program a request."""
    traits = traits_of(device, form)
    edges, _, gap_edges = print_key_bounds(form.mask, traits)
    gap_edges = gap_edges if has_gap(form) else None
    every = (*edges, *(gap_edges or ()))
    captured = () if all(edge.is_affine for edge in every) else captured_arguments(form.mask)
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "HEAD_TILES": form.kv_heads * config.head_tiles(form.group),
        "TILES": _TILES,
        "REQUESTS": _REQUESTS,
        "TILE_WORDS": TILE_WORDS,
        "CUT_WORDS": cut_words(form, config),
        "CUT_FROM": _CUT_FROM,
        "CUT_COST": _CUT_COST,
        "PARTS_OF_SHARE": PARTS_OF_SHARE,
        "LEAST_PART": _LEAST_PART,
        "MOST_PARTS": _MOST_PARTS if config.splits else 1,
        "SLOTS": split_slots(form, config, device),
    }
    counts = ("num_requests",) * (not form.ragged_kv) + ("num_sms",)
    found = [*request_arguments(form)[1:], *several("i32", *counts), *captured]
    sliced = config.sliced(form.group)
    if sliced:
        settings |= {"GROUP": form.group, "CONSUMERS": config.heads}
    given, phased = [each.name for each in found], form.phase != ""
    found.append(Argument("capacity", "i32"))
    found += several("i32", *("streaming_sms",) * phased)
    names = ["ROW_TILES", "COUNTER", "CUT_TILES"]
    if form.phase:
        names.append("PREFILLS")
        settings |= {
            "PACKED": form.group,
            "DECODE_QUERIES": DECODE_QUERIES,
            "STREAMED_ROWS": _STREAMED_ROWS,
            "STREAMED_TIME": _STREAMED_TIME * form.kv_heads,
            "STREAMED_ON_SM": _STREAMED_ON_SM * form.kv_heads,
            "LIGHT": _LIGHT,
            "JOINED": _JOINED * form.kv_heads,
        }
    found += several("*i32", *names, divisible_by=4)
    context = {
        **mod_context([edge.statements for edge in every], device),
        "constants": settings,
        "edges": edges,
        "gap_edges": gap_edges,
        "form": form,
        "launch_pdl": device.backend == "cuda",
        "sliced": sliced,
        "request_arguments": ["b", *["light"] * phased, *given],
        "request_values": lambda b, light="light": ", ".join((b, *[light] * phased, *given)),
    }
    header = [f"tiles of {config.BLOCK_M} rows of a batch for {device.arch}"]
    return make_source("hopper/row_tiles.py.jinja", device, header, context, found)


def prefills_from(form: ServingForm, config: base.RaggedConfig, most: int) -> int:
    """Queries from which on each request of up to `most` is a prefill, as row tiles decide it."""
    for n in range(most, DECODE_QUERIES, -1):
        streamed = -(-n * form.group // _STREAMED_ROWS) * _STREAMED_TIME * form.kv_heads
        # A kernel compares float32.
        if tiles_of_rows(form, config, n) > 0.999 * streamed:
            return n + 1
    return DECODE_QUERIES + 1


def render_merge_parts(form: ServingForm, config: HopperPrefillConfig, device: Device) -> Source:
    """The kernel that merges the parts of the tiles of rows whose keys were cut."""
    settings = constants(form, config, device) | {
        "BLOCK_M": config.all_rows,
        "TILE_TOKENS": config.BLOCK_M,
        "TILE_HEADS": config.heads,
        "HEADS": form.kv_heads,
        "PACKED": form.group,
        "CUT_WORDS": cut_words(form, config),
        "ALL_HEAD_TILES": form.kv_heads * config.head_tiles(form.group),
        "HEAD_DIM_V": form.head_dim_v,
        "MERGE_ROWS": _MERGE_ROWS,
        "MERGE_PARTS": _MERGE_PARTS,
        "ROW_PARTS": config.all_rows // _MERGE_ROWS,
    }
    found = [Argument("OUT", f"*{signature_type(form.out_dtype)}", 16)]
    found += several("*fp32", *("LSE",) * form.lse, divisible_by=4)
    found += [Argument("WORKSPACE", "*fp32", 16), Argument("CUT_TILES", "*i32", 4)]
    found += [*sinks(form), Argument("stride_om", "i32")]
    context = {
        "constants": settings | BASE_2,
        "v_pieces": named_pieces("v", form.head_dim_v),
        # Parts have V's scale already.
        "form": replace(form, scaled=False),
        "cut_tiles": True,
        "sliced": config.sliced(form.group),
        "launch_pdl": device.backend == "cuda",
        "out_element": triton_type(form.out_dtype),
    }
    header = [f"merge of parts of {config.BLOCK_M} rows for {device.arch}"]
    return make_source("hopper/merge_parts.py.jinja", device, header, context, found)
