"""Rows of requests, keys in pages or packed: the parts that forwards in Gluon share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flexattn.kernels.base.arguments import (
    Argument,
    captured_arguments,
    dense_stride_arguments,
    several,
    sinks,
)
from flexattn.kernels.base.config import Config
from flexattn.kernels.printers.mask_printer import print_key_bounds
from flexattn.kernels.printers.spelling import signature_type
from flexattn.kernels.printers.triton_printer import Traits
from flexattn.problem import Structure
from flexattn.problem.serving import ServingForm, ServingProblem

# Keys of a page that boxes of the copy engine are made for.
PAGES = (16, 32, 64, 128, 256)
# Columns of K or V in one copy of a page: 128 bytes, which is the widest swizzle.
PAGE_COLUMNS = 64
# Heads that the rows of a tile may be of.
_PACKED = (1, 2, 4, 8, 16, 32, 64)
# Numbers of a tile of rows.
TILE_WORDS = 5
# Assumed: so many requests of a server's batch are prefills at a time, and the others decode.
_PREFILLS = 8


class RaggedConfig(Config, Protocol):
    """A config whose rows are cut by requests.

    packed_heads: heads of a group in the rows of a tile; row r is of head r % packed_heads.
    splits: whether the device may cut a tile's keys into parts.
    """

    @property
    def packed_heads(self) -> int: ...
    @property
    def splits(self) -> bool: ...
    def sliced(self, group: int) -> bool: ...
    def head_tiles(self, group: int) -> int: ...


def form_of(structure: Structure) -> ServingForm | None:
    """A structure as a plan's; None for a call's."""
    return structure if isinstance(structure, ServingForm) else None


def gathers(form: ServingForm) -> bool:
    """True if the copy engine has no boxes for a cache's pages."""
    return form.page not in (0, *PAGES)


def packs(form: ServingForm) -> bool:
    """True if the rows of a tile may be of several heads: no mod reads the head, or diagonals."""
    named = any(
        mod is not None and "h" in mod.mod.expr.variables for mod in (form.score, form.mask)
    )
    return not named and (form.terms is None or form.terms.diagonal is None)


def prefill_rows(problem: ServingProblem) -> int:
    """Query positions that a prefill of a plan brings, by its maxima."""
    form = problem.structure
    served = form.ragged and not form.ragged_kv
    return problem.rows // (min(problem.B, _PREFILLS) if served else problem.B)


def packed_heads(rows: int, group: int, tile: int) -> int:
    """Heads of a group that share tiles, where a request brings so many query positions.

    Each tile of rows reads and multiplies the same keys, so the time is the number of tiles: those
    of the positions of some heads, times those that the group's heads make. If several are equal,
    most heads read the keys least often.
    """
    able = [heads for heads in _PACKED if heads < 2 * group]
    return min(able, key=lambda heads: (-(-group // heads) * -(-rows * heads // tile), -heads))


def lacks(form: ServingForm, config: RaggedConfig) -> dict[str, bool]:
    """What no forward in Gluon has of plans, in words, and whether a plan asks for it."""
    return {
        "a contiguous cache": not form.page and not form.ragged_kv,
        f"pages of {form.page}": gathers(form),
        "scales of pages or tokens": form.scales != "",
        "keys that hold the values": form.shared_kv,
        "chosen keys": form.unit > 0,
        "a shared prefix": form.prefix or form.offset,
        "batch-invariant rows": form.split_keys > 0,
        f"packed_heads={config.packed_heads}": config.packed_heads not in _PACKED,
        "packed_heads beside mods of a head": config.packed_heads > 1 and not packs(form),
    }


def described_rows(
    name: str, dtype: str, rows: int, width: int, config: RaggedConfig
) -> tuple[str, str]:
    """A descriptor of a tile's rows, of several heads, in a tensor [Hkv, rows, group, D]."""
    heads = config.packed_heads
    return name, f"tensordesc<{signature_type(dtype)}{[1, rows // heads, heads, width]}>"


def row_constants(
    form: ServingForm, config: RaggedConfig, rows: int, keys: int
) -> dict[str, object]:
    """Sizes of pages and of rows, where a tile has so many rows and a copy so many keys.

    PAGES: of a tile; PAGE_ROWS: keys of one copy, or that are cleared at a time. TOKENS: query
    positions of a tile, each of PACKED_HEADS heads. HEAD_TILES: tiles of the heads of a group,
    HEADS each.
    """
    return {
        "PAGE": form.page, "PAGE_ROWS": keys, "PAGES": config.BLOCK_N // keys,
        "TOKENS": rows // config.packed_heads, "PACKED_HEADS": config.packed_heads,
        "GROUP": form.group, "HEAD_TILES": config.head_tiles(form.group), "HEADS": config.heads,
    }  # fmt: skip


def request_arguments(form: ServingForm) -> list[Argument]:
    """The arguments from which tiles of rows and lengths of requests are read.

    ROW_TILES [2 + TILE_WORDS x tiles] is made by `hopper/row_tiles.py.jinja` before every launch.
    """
    keys = "CU_SEQLENS_K" if form.ragged_kv else "SEQ_LENS"
    names = ("ROW_TILES", keys, *("CU_SEQLENS",) * form.ragged)
    most = ("total_k", "num_requests") if form.ragged_kv else ("max_keys",)
    numbers = ("total_q" if form.ragged else "q_rows", *most)
    return several("*i32", *names, divisible_by=4) + several("i32", *numbers)


def pages(form: ServingForm) -> list[Argument]:
    """The arguments that tell where pages are; none of packed sequences."""
    return [Argument("TABLE", "*i32", 4), Argument("stride_table", "i32")] if form.page else []


def arguments(
    form: ServingForm, config: RaggedConfig, described: Mapping[str, str]
) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order; none of them depends on a length.

    described: types of Q, K, V and OUT: descriptors, or pointers to a cache. OUT_ROWS: the address
    of OUT [rows, Hq, Dv], for tiles that end within a request. LSE [rows, Hq].
    """
    found = [
        Argument(name, kind, 16 if kind.startswith("*") else 1) for name, kind in described.items()
    ]
    found.append(Argument("OUT_ROWS", f"*{signature_type(form.out_dtype)}", 16))
    found += several("*fp32", *("LSE",) * form.lse, divisible_by=4)
    found += (Argument("WORKSPACE", "*fp32", 16),) * config.splits
    found += dense_stride_arguments("o", "hm", form.head_dim_v)
    found += several("i32", "Hq", "group")
    if form.scaled:
        found += several("*fp32", "K_SCALE", "V_SCALE", divisible_by=4)
        found.append(Argument("stride_scale", "i32"))
    found += [Argument("COUNTER", "*i32", 4), *request_arguments(form)]
    found += pages(form)
    found += [Argument("sm_scale", "fp32"), *sinks(form)]
    return (*found, *captured_arguments(form.score, form.mask))


def request_context(form: ServingForm, traits: Traits, gaps: bool = False) -> dict[str, object]:
    """The variables of base/requests.jinja.

    edges, free_edges, gap_edges: bounds of the keys that a mask keeps, of those that it keeps of
    all rows, and of a gap between others; None where nothing is known of these. gaps: whether the
    loop over keys leaves a gap out.
    """
    edges, free_edges, gap_edges = print_key_bounds(form.mask, traits)
    gap_edges = gap_edges if gaps else None
    captured: list[str] = []
    if not all(edge.is_affine for edge in (*edges, *(free_edges or ()), *(gap_edges or ()))):
        captured = [each.name for each in captured_arguments(form.mask)]
    return {
        "edges": edges,
        "free_edges": free_edges,
        "gap_edges": gap_edges,
        "tile_words": TILE_WORDS,
        "request_arguments": ["Hq", *(each.name for each in request_arguments(form))],
        "range_arguments": ["b", "q_first", "rows_left", "kv_len", *captured],
        "range_values": ["b", "row_start", "rows_left", "kv_len", *captured],
        "range_captures": captured,
    }
