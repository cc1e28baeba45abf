"""The kernels that list chosen blocks, by query and by key, and those that some row chose."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, several
from flexattn.kernels.base.source import Source, make_source

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
