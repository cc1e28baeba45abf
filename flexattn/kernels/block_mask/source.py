"""Kernels of block masks: one classifies blocks by bounds of a mask, others list chosen blocks.

Lists are by query and by key, of the blocks that some row chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, captured_arguments, several
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.source import Source, expression_line, make_source, mod_context
from flexattn.kernels.printers.spelling import (
    TRITON,
    buffer_names,
    literal,
    scalar_name,
    signature_type,
    triton_type,
)
from flexattn.kernels.printers.triton_printer import Traits, print_mod
from flexattn.mods import Mod
from flexattn.mods.algebra import Bounds, SearchTable, TableUse, bounds_of
from flexattn.mods.algebra.bounds import CORNERS
from flexattn.mods.analysis.intervals import intervals_of
from flexattn.mods.expr import Expr, walk
from flexattn.mods.ops import OPS, Range
from flexattn.problem import Captures


class PrintedBounds(NamedTuple):
    """Statements, and the names of the two verdicts: int1, as wide as what they depend on."""

    statements: tuple[str, ...]
    must: str
    may: str


def print_bounds(mod: Mod, bounds: Bounds) -> PrintedBounds:
    """Triton statements over int64 tensors q_lo, q_hi [1], kv_lo, kv_hi [TILES], b_at, h_at [1].

    Captured tensors are read through the arguments that `table_names` lists.
    """
    ranges: dict[str, Range] = {name: (0, most) for name, most in CORNERS.items()}
    known = intervals_of(bounds.must, ranges) | intervals_of(bounds.may, ranges)
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for node in walk(bounds.must, bounds.may):
        args = [names[arg] for arg in node.args]
        if node.op == "var":
            name = str(node.value)
            names[node] = f"{name}_at" if name in ("b", "h") else name
        elif node.op == "const" and node.dtype == "int64":
            names[node] = str(node.value)
        else:
            text = _text(node, args, mod, bounds, known)
            names[node] = f"tile_{len(lines)}"
            lines.append(f"{names[node]} = {text}")
    return PrintedBounds(tuple(lines), names[bounds.must], names[bounds.may])


def table_names(number: int, use: TableUse, rank: int) -> tuple[tuple[str, str], ...]:
    """The kernel's arguments for one table: each name, and its type where it is a number.

    The type of the pointer is the captured tensor's.
    """
    base = f"table{number}"
    strides = tuple((f"{base}_stride{dim}", "i64") for dim in range(max(rank - 1, 0)))
    return ((base, ""), *(((f"{base}_sorted", "i32"),) if use.dim >= 0 else ()), *strides)


def table_values(number: int, use: TableUse, table: SearchTable) -> dict[str, Any]:
    """The values that a launch passes for `table_names`, by name."""
    base = f"table{number}"
    strides = table.values.stride()[:-1]
    values: dict[str, Any] = {f"{base}_stride{dim}": stride for dim, stride in enumerate(strides)}
    values[base] = table.values
    return values | ({f"{base}_sorted": int(table.ordered)} if use.dim >= 0 else {})


def _text(
    node: Expr, args: list[str], mod: Mod, bounds: Bounds, known: dict[Expr, Range | None]
) -> str:
    if node.op == "const":
        return f"tl.full([1], {literal(node.value, node.dtype)}, {triton_type(node.dtype)})"
    if node.op == "scalar":
        number = f"tl.cast({scalar_name(mod.kind, int(node.value or 0))}, tl.int64)"
        number = f"(zero.to(tl.int64) + {number})"
        return f"({number} != 0)" if node.dtype == "bool" else number
    if node.op == "size":
        slot, dim = map(int, str(node.value).split("."))
        sizes = buffer_names(mod.kind, slot, mod.buffers[slot].rank)[1]
        return f"zero + {sizes[dim]}"
    if node.op == "table_sorted":
        return f"(zero + table{node.value}_sorted != 0)"
    if node.op in ("table_min", "table_max"):
        table = int(node.value or 0)
        return _read(table, bounds.tables[table], args, node.op.removeprefix("table_"))
    if node.op == "cast":
        whole = f"{args[0]}.to(tl.int32)" if node.args[0].dtype == "bool" else args[0]
        return f"{whole}.to({triton_type(node.dtype)})"
    if node.op in ("floor_div", "floor_mod"):
        ends = [known[arg] for arg in node.args]
        if all(end is not None and end[0] >= 0 for end in ends):
            return f"({args[0]} {OPS[node.op].symbol} {args[1]})"
    if node.op == "not":
        return f"({args[0]} == 0)"
    return TRITON.computed(OPS[node.op], node.dtype, args)


def _read(number: int, use: TableUse, places: list[str], end: str) -> str:
    base = f"table{number}"
    if use.dim < 0:
        return _load(base, places)
    *places, last = places
    places = [*places[: use.dim], *places[use.dim + 1 :], places[use.dim]]
    ends = ", ".join(_load(base, [*places[:-1], at]) for at in (places[-1], last))
    return f"tl.{end}imum({ends})"


def _load(base: str, places: list[str]) -> str:
    strided = [f"{place} * {base}_stride{dim}" for dim, place in enumerate(places[:-1])]
    return f"tl.load({' + '.join([base, 'zero', *strided, *places[-1:]])}).to(tl.int64)"


# Blocks that a program classifies.
STRIP = 128


def mask_arguments(captures: Captures, bounds: Bounds) -> tuple[Argument, ...]:
    """Arguments of the kernel that classifies the blocks of a mask."""
    found = [
        Argument("KINDS", "*i8", 16),
        Argument("first_row", "i64"),
        *several("i32", "H", "q_len", "kv_len", "q_blocks", "kv_blocks"),
        *captured_arguments(captures),
    ]
    for number, use in enumerate(bounds.tables):
        buffer = captures.mod.buffers[use.slot]
        element = "u8" if buffer.dtype == "bool" else signature_type(buffer.dtype)
        names = table_names(number, use, buffer.rank)
        found += [Argument(name, kind or f"*{element}") for name, kind in names]
    return tuple(found)


def render_block_mask(captures: Captures, q_block: int, kv_block: int, device: Device) -> Source:
    """The kernel that classifies every block of a mask."""
    interpreted = Traits(interpreted=device.backend == "interpreter")
    mask = print_mod(captures, interpreted)
    bounds = bounds_of(captures.mod)
    printed = print_bounds(captures.mod, bounds)
    tile_m, tile_n = (min(32, power_above(block)) for block in (q_block, kv_block))
    settings = {
        "SPARSE_Q": q_block,
        "SPARSE_KV": kv_block,
        "BLOCK_M": tile_m,
        "BLOCK_N": tile_n,
        "PARTS_M": -(-q_block // tile_m),
        "PARTS_N": -(-kv_block // tile_n),
        "TILES": STRIP,
    }
    context = {
        **mod_context([mask.lines, printed.statements], device),
        "hoisted": mask.hoisted,
        "mask": mask,
        "bounds": printed,
        "constants": settings,
    }
    title = f"block mask {q_block}x{kv_block} for {device.arch}"
    header = [title, f"mask_mod: {expression_line(captures)}"]
    found = mask_arguments(captures, bounds)
    return make_source("block_mask/block_mask.py.jinja", device, header, context, found)


# The most blocks that one program sorts, of a call's mask and of a plan.
MOST_CHOSEN, MOST_LISTED = 1024, 4096
# Units that a program of the third compares its choices with at a time.
_UNITS = 32
# Entries of lists that a program of the second kernel has at a time.
_ENTRIES = 2048


class ChosenForm(NamedTuple):
    """The sizes and options for which the kernel of lists by query is rendered.

    rows, keys: of a block. width: the places that a program has for a choice, a power of two.
    dtype: of indices. counted: choices have counts. masked: a mask decides within each
    block, so that none is full; causal: this mask is q_idx >= kv_idx, whose full blocks are known.
    whole: blocks are all listed alike, without lists of full ones.
    """

    rows: int
    keys: int
    width: int
    dtype: str
    counted: bool
    masked: bool
    causal: bool
    whole: bool = False


def render_chosen(form: ChosenForm, device: Device) -> Source:
    """The kernel of lists by query, a program for each block of rows of each head."""
    found = [Argument("INDICES", "*i32" if form.dtype == "int32" else "*i64")]
    found += several("*i32", *("COUNTS",) * form.counted, divisible_by=4)
    full = ("FULL_NUM", "FULL_IDX") * (not form.whole)
    found += several("*i32", "NUM", "IDX", *full, divisible_by=4)
    found += several("i32", "Hq", "heads", "rows", "k", "kv_blocks", "q_len", "kv_len")
    context = {
        "constants": {"WIDTH": form.width, "ROWS": form.rows, "KEYS": form.keys},
        "counted": form.counted,
        "masked": form.masked and not form.causal,
        "causal": form.causal,
        "whole": form.whole,
        "launch_pdl": form.whole and device.backend == "cuda" and device.capability >= 90,
    }
    header = [f"lists of chosen blocks {form.rows}x{form.keys} for {device.arch}"]
    warps = max(1, min(8, form.width // 256)) if form.whole else 1
    return make_source("block_mask/chosen.py.jinja", device, header, context, found, warps)


def render_by_key(width: int, device: Device) -> Source:
    """The kernel of lists by key, a program for each block of keys; width: as of a form."""
    names = ("NUM", "IDX", "FULL_NUM", "FULL_IDX")
    by_key = ("Q_NUM", "Q_IDX", "FULL_Q_NUM", "FULL_Q_IDX")
    found = several("*i32", *names, *by_key, divisible_by=4)
    found += several("i32", "rows", "k", "kv_blocks")
    context = {"constants": {"WIDTH": width, "LINES": max(1, _ENTRIES // width)}}
    header = [f"lists by key of {width} places for {device.arch}"]
    return make_source("block_mask/by_key.py.jinja", device, header, context, found)


def render_mapped(
    rows: int, unit: int, block: int, dtype: str, counted: bool, causal: bool, device: Device
) -> Source:
    """The kernel of a map of choices, a program for each `block` query rows of each head.

    rows: those that choose together; unit: keys of a choice. Both divide block.
    """
    found = [Argument("INDICES", "*i32" if dtype == "int32" else "*i64")]
    found += several("*i32", *("COUNTS",) * counted, divisible_by=4)
    found += [Argument("MAP", "*i8"), *several("*i32", "NUM", "IDX", divisible_by=4)]
    found += several("i32", "group", "rows", "k", "units", "blocks", "kv_blocks")
    parts = max(1, _UNITS * unit // block)
    constants = {"CHOICES": block // rows, "IN_BLOCK": block // unit, "PARTS": parts}
    context = {"constants": constants, "counted": counted, "causal": causal}
    header = [f"choices of {rows} rows among units of {unit} keys for {device.arch}"]
    return make_source("block_mask/mapped.py.jinja", device, header, context, found, 8)
