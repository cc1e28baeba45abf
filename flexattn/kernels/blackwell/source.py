"""Source of the Blackwell kernel: its arguments, its mods as Gluon, and its template's context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from typing import NamedTuple

from flexattn.device import Device
from flexattn.kernels.base.arguments import Argument, attention_arguments, descriptor
from flexattn.kernels.base.config import describe, touched_runs
from flexattn.kernels.base.features import ALL_KEYS, skips_far
from flexattn.kernels.base.mask_pieces import print_mask
from flexattn.kernels.base.ragged import (
    PAGE_COLUMNS,
    arguments as ragged_arguments,
    described_rows,
    form_of,
    request_context,
    row_constants,
)
from flexattn.kernels.base.source import (
    BASE_2,
    Source,
    expressions,
    make_source,
    printed_context,
    traits_of,
)
from flexattn.kernels.blackwell.config import (
    LANES,
    OUT_COLUMNS,
    WARPGROUP,
    BlackwellPrefillConfig,
    qk_widths,
)
from flexattn.kernels.printers.score_printer import print_score
from flexattn.kernels.printers.spelling import gluon_dialect
from flexattn.problem import Structure

BLACKWELL = gluon_dialect("S_LAYOUT")
_TEMPLATE = "blackwell/prefill.py.jinja"
# 2^r on [-1/2, 1/2] within 7.5e-5 of it, by reweighted least squares. A weight is rounded to 2^-9
# or 2^-11 of itself.
POLYNOMIAL = (0.99992813, 0.69326098, 0.24261014, 0.055171154)
# Query heads of a plan whose tiles are at work at once.
_SECTION = 8
# Columns of P that a thread has in registers at once.
PIECE = 32
# 1.5 * 2^23: a number below it in magnitude, added to it, is rounded to an integer.
ROUNDER = 12582912.0


class _Chunk(NamedTuple):
    """Columns of one copy of Q or K."""

    start: int
    width: int


# Barriers of each stage of K and V, and of each tile of rows.
_OF_STAGES = ("K_FULL", "K_EMPTY", "V_FULL", "V_EMPTY")
_OF_TILES = (
    "Q_FULL", "S_FULL", "P_FULL", "O_FULL", "O_EMPTY", "ALPHA_FULL", "SUMS_FULL",
)  # fmt: skip


def _places(counts: Mapping[str, int], total: str) -> dict[str, object]:
    """The first place of each of several arrays in one, and the number of all places."""
    found: dict[str, object] = {}
    place = 0
    for name, count in counts.items():
        found[name] = place
        place += count
    return {**found, total: place}


def arguments(structure: Structure, config: BlackwellPrefillConfig) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order."""
    widths = qk_widths(structure.head_dim_qk)
    dtype, keys, form = structure.dtype, config.BLOCK_N, form_of(structure)
    if form is not None:
        keys = min(form.page, keys)
        described = (
            described_rows("Q", dtype, LANES, widths[0], config),
            descriptor("K", dtype, keys, PAGE_COLUMNS),
            descriptor("V", dtype, keys, PAGE_COLUMNS),
            described_rows("OUT", dtype, LANES, OUT_COLUMNS, config),
        )
        return ragged_arguments(form, config, dict(described))
    tiles = (
        ("Q", dtype, LANES, widths[0]),
        ("K", dtype, keys, widths[0]),
        ("V", dtype, keys, structure.head_dim_v),
        ("OUT", structure.out_dtype, LANES, OUT_COLUMNS),
    )
    return attention_arguments(structure, config, dict(starmap(descriptor, tiles)))


def render(
    structure: Structure, config: BlackwellPrefillConfig, device: Device, title: str
) -> Source:
    """The Blackwell prefill kernel of a structure with a config; title goes into its header."""
    found = arguments(structure, config)
    traits = traits_of(device, structure)._replace(dialect=BLACKWELL)
    form = form_of(structure)
    score = None
    if structure.score is not None:
        # A thread has all keys of a row: it shares no values of diagonals.
        apart = replace(structure, rules_off=tuple({*structure.rules_off, "diagonal"}))
        score = print_score(apart, traits)._replace(limits=None)
    mask = None
    if structure.mask is not None:
        # Rows of requests begin at any position, and several may be of one.
        tile = (LANES, config.BLOCK_N) if form is None else None
        mask = print_mask(structure.mask, traits, tile, "TOKENS", exchanges=False)
    sparsity = structure.sparsity
    runs = (
        touched_runs(structure, config, config.q_tiles) if form is None else int(mask is not None)
    )
    decay_skip = form is None and skips_far(structure, config)
    widths = qk_widths(structure.head_dim_qk)
    settings = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "ROWS": LANES,
        "TOKENS": LANES // config.packed_heads,
        "Q_TILES": config.q_tiles,
        "STAGES": config.num_stages,
        "HEAD_DIM_QK": structure.head_dim_qk,
        "HEAD_DIM_V": structure.head_dim_v,
        "PIECE": PIECE,
        "O_COLUMNS": OUT_COLUMNS,
        "O_PARTS": structure.head_dim_v // OUT_COLUMNS,
        "V_TYPE": BLACKWELL.type(structure.out_dtype),
    }
    if sparsity is not None:
        settings |= {
            "SPARSE_Q": sparsity.q_block,
            "SPARSE_KV": sparsity.kv_block,
            "TILES_PER_KV": sparsity.kv_block // config.BLOCK_N,
        }
    if form is not None:
        settings |= row_constants(form, config, LANES, min(form.page, config.BLOCK_N))
        settings |= {
            "V_BOX": PAGE_COLUMNS,
            "V_BOXES": form.head_dim_v // PAGE_COLUMNS,
            "L2_SWIZZLE": _SECTION,
        }
    if decay_skip:
        settings["ALL_KEYS"] = float(ALL_KEYS)
    if config.polynomial:
        settings["ROUNDER"] = ROUNDER
    rows = ("ALPHAS", "SUMS", "MAXIMA", *("EXACT_MAXIMA",) * structure.max_scores)
    settings |= _places(dict.fromkeys(rows, config.q_tiles), "ROW_VALUES")
    settings |= _places(
        dict.fromkeys(_OF_STAGES, config.num_stages) | dict.fromkeys(_OF_TILES, config.q_tiles),
        "BARRIERS",
    )
    context = {
        **printed_context((score, mask), device, BLACKWELL),
        "config": config,
        "structure": structure,
        "score": score,
        "mask": mask,
        "constants": settings | BASE_2,
        "qk_chunks": [_Chunk(sum(widths[:i]), width) for i, width in enumerate(widths)],
        "polynomial": POLYNOMIAL,
        "has_full": sparsity is not None and sparsity.has_full,
        "listed": sparsity is not None and not runs,
        "runs": runs,
        "decay_skip": decay_skip,
        "fold_scale": structure.positive_scale if score is None else score.folded,
        "far": structure.far or structure.sinks != "",
        "ragged": form is not None,
        "paged": form is not None,
        "k_starts": range(0, structure.head_dim_qk, PAGE_COLUMNS),
        "v_starts": range(0, structure.head_dim_v, PAGE_COLUMNS),
        "page_boxes": form is not None,
        # Parts of those templates that other kernels have.
        **dict.fromkeys(("splits", "early_number"), False),
        **({} if form is None else request_context(form, traits)),
    }  # fmt: skip
    header = [title, f"config: {describe(config)}", *expressions(structure)]
    return make_source(
        _TEMPLATE, device, header, context, found, WARPGROUP, config.num_stages, "gluon"
    )
