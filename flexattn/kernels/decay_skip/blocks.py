"""Source of the kernel that finds, by decay windows, which tiles of a backward have weights."""

from __future__ import annotations

from dataclasses import replace

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, captured_arguments
from flexattn.kernels.base.source import Source, make_source, mod_context, traits_of
from flexattn.kernels.base.vanishing import M_BLOCK_MAX, N_BLOCK_MIN
from flexattn.kernels.printers.triton_printer import Printed, View, print_mod
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.problem import INDEX_RANGES, Structure

# Tiles of a head that a program works on at a time.
PLACES = 256


def render_blocks(structure: Structure, rows: int, keys: int, device: Device) -> Source:
    """The kernel for tiles of so many rows and keys.

    structure: of a backward, without a mask or with one whose blocks form runs.
    """
    under, sparsity = _under(structure, device), structure.sparsity
    settings = {"BLOCK_M": rows, "BLOCK_N": keys, "PLACES": PLACES}
    found = [Argument("DECAY_WINDOW", "*fp32", 16), M_BLOCK_MAX, N_BLOCK_MIN]
    found += [Argument(name, "i32") for name in ("Hq", "kv_len", "m_blocks", "n_blocks")]
    if sparsity is not None:
        settings |= {"SPARSE_Q": sparsity.q_block, "SPARSE_KV": sparsity.kv_block}
        found.append(Argument("KV_RUNS", "*i32", 4))
        found += [Argument(f"stride_kv_mask_{axis}", "i64") for axis in "bh"]
    if under is not None:
        found += captured_arguments(structure.mask)
    context: dict[str, object] = {
        **mod_context([] if under is None else [under.lines], device),
        "constants": tuple(settings.items()),
        "sparse": sparsity is not None,
        "under": under,
    }
    header = [f"tiles with weights of a backward for {device.arch}"]
    return make_source("decay_skip/blocks.py.jinja", device, header, context, tuple(found), 4, 1)


def _under(structure: Structure, device: Device) -> Printed | None:
    """One past the last key that row `first_row` keeps, of a mask that keeps all keys before it.

    None for any other mask. Later rows of a tile keep those keys as well: the bound never falls.
    """
    if structure.mask is None:
        return None
    mod = structure.mask.mod
    span = mask_form(mod.expr, INDEX_RANGES).span
    if not span.is_prefix:
        return None
    assert span.high is not None
    view = View("under", q_idx="first_row", by_key=False, dtype="int32")
    traits = traits_of(device, structure)
    return print_mod(replace(mod, expr=span.high), structure.mask.contiguous, traits, view)
