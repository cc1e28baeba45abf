"""Sources of the kernels that find which keys a falling score leaves no weight: "decay_skip"."""

from __future__ import annotations

from flexattn.device import Device
from flexattn.kernels.base.arguments import (
    M_BLOCK_MAX,
    N_BLOCK_MIN,
    Argument,
    captured_arguments,
    pointer,
    several,
    stride_arguments,
    strides_of,
)
from flexattn.kernels.base.config import power_above
from flexattn.kernels.base.features import ALL_KEYS
from flexattn.kernels.base.source import BASE_2, Source, make_source, printed_context, traits_of
from flexattn.kernels.printers.score_printer import LOG2E
from flexattn.kernels.printers.triton_printer import Printed, View, print_mod
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.rules import FLOAT
from flexattn.mods.simplify import make
from flexattn.problem import INDEX_RANGES, Structure

# Of a program that takes norms, and squared norms that are compared at once.
_ELEMENTS, _PARTS = 8192, 256
# A weight of 2^-VANISHES is 0 in float32, whose smallest number is 2^-149.
VANISHES = 150
# Twice a bound on the scores, with one percent for what is rounded.
TWICE = 2.02
# Up to here the numbers that are added are rounded by less than the bound has room for.
_ROUNDED = 2**24
# Past all bounds that are met before all keys are.
HUGE = 1e18


def rows_of_part(head_dim: int) -> int:
    """The number of rows of q or k of which one program takes the norms."""
    return max(16, min(128, _ELEMENTS // power_above(head_dim)))


def render_norms(structure: Structure, device: Device) -> Source:
    """The kernel that finds the longest rows of q and of k; see flexattn.runtime.decay_skip."""
    head_dim = structure.head_dim_qk
    settings = {
        "ROWS": rows_of_part(head_dim),
        "HEAD_DIM": head_dim,
        "TILE_D": power_above(head_dim),
    }
    found = [pointer("q", structure), pointer("k", structure), Argument("NORMS", "*fp32", 16)]
    found += [*strides_of("q", structure), *strides_of("k", structure)]
    sizes = ("Hq", "Hkv", "q_len", "kv_len", "q_parts", "k_parts", "q_programs")
    found += several("i32", *sizes)
    found.append(Argument("start", "i64"))
    header = [f"norms of {structure.dtype} D={head_dim} for {device.arch}"]
    context = {
        "constants": settings,
        "layout": structure.layout,
    }
    return make_source("decay_skip/norms.py.jinja", device, header, context, found)


def render_window(structure: Structure, device: Device) -> Source:
    """The kernel that makes of norms and slopes how many keys may count, float32 [B, Hq]."""
    terms, captures = structure.terms, structure.score
    assert terms is not None and terms.rise is not None and captures is not None
    step = make("mul", FLOAT, (terms.rise.step, LOG2E))
    last = View("", "q_len", "kv_len", by_row=False, by_key=False)
    traits = traits_of(device, structure)
    printed = [
        print_mod(captures, traits, last._replace(prefix=name), expr)
        for name, expr in (("step", step), ("span", terms.rise.span))
    ]
    settings = {
        "PARTS": _PARTS,
        "SCALE": BASE_2["LOG2E"] * float(terms.outer.value or 0),
        "TWICE": TWICE,
        "VANISHES": float(VANISHES),
        "HUGE": HUGE,
        "ROUNDED": float(_ROUNDED),
        "ALL_KEYS": float(ALL_KEYS),
    }
    found = [Argument("NORMS", "*fp32", 16)]
    sizes = ("Hq", "group", "stride_kb", "q_len", "kv_len", "q_parts", "k_parts")
    found += several("i32", *sizes)
    found += several("i64", "start", "k_start")
    found.append(Argument("sm_scale", "fp32"))
    if structure.fp8:
        found += several("*fp32", "Q_DESCALE", "K_DESCALE")
        found += several("i64", *(f"{x}_descale_{axis}" for x in "qk" for axis in "bh"))
    found += captured_arguments(captures)
    context = {
        "fp8": structure.fp8,
        **printed_context(printed, device),
        "constants": settings,
        "lines": [x for each in printed for x in (*each.hoisted, *each.early, *each.body)],
        "step": printed[0].result,
        "span": printed[1].result,
    }
    header = [f"decay window of a score_mod for {device.arch}"]
    return make_source("decay_skip/window.py.jinja", device, header, context, found)


# Tiles of a head that a program works on at a time.
PLACES = 256


def render_blocks(structure: Structure, rows: int, keys: int, device: Device) -> Source:
    """The kernel for tiles of so many rows and keys.

    structure: of a backward, without a mask or with one whose blocks form runs.
    """
    under, sparsity = _under(structure, device), structure.sparsity
    settings = {"BLOCK_M": rows, "BLOCK_N": keys, "PLACES": PLACES}
    found = [Argument("DECAY_WINDOW", "*fp32", 16), M_BLOCK_MAX, N_BLOCK_MIN]
    found += several("i32", "Hq", "kv_len", "m_blocks", "n_blocks")
    if sparsity is not None:
        settings |= {"SPARSE_Q": sparsity.q_block, "SPARSE_KV": sparsity.kv_block}
        found.append(Argument("KV_RUNS", "*i32", 4))
        found += stride_arguments("kv_mask_", "bh")
    if under is not None:
        found += captured_arguments(structure.mask)
    context = {
        **printed_context((under,), device),
        "constants": settings,
        "sparse": sparsity is not None,
        "under": under,
    }
    header = [f"tiles with weights of a backward for {device.arch}"]
    return make_source("decay_skip/blocks.py.jinja", device, header, context, found)


def _under(structure: Structure, device: Device) -> Printed | None:
    """One past the last key that row `first_row` keeps, of a mask that keeps all keys before it.

    None for any other mask. Later rows of a tile keep those keys as well: the bound never falls.
    """
    if structure.mask is None:
        return None
    span = mask_form(structure.mask.mod.expr, INDEX_RANGES).span
    if not span.is_prefix:
        return None
    assert span.high is not None
    view = View("under", q_idx="first_row", by_key=False, dtype="int32")
    return print_mod(structure.mask, traits_of(device, structure), view, span.high)
