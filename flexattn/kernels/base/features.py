"""Features of a structure that kernels are made by: what its mods read, and when it is read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import TypeAlias

from flexattn.kernels.base.config import Config, walks_runs
from flexattn.mods.analysis.affine import same_in_tiles
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import Expr, depending, walk
from flexattn.mods.rules import ONE
from flexattn.problem import INDEX_RANGES, MAX_LENGTH, Structure

# A number of keys that is past all of them.
ALL_KEYS = 2 * MAX_LENGTH
# Values that a score_mod reads for every key are held in registers until all of them are there. On
# sm_90, beyond this number the loops of tall tiles, and of Hopper's template, spill.
FEW_BY_KEY = 2
# Rows and keys of which a template can ask a mask_mod at once.
Unit: TypeAlias = tuple[int, int]


def keys_aligned(structure: Structure, *tiles: int) -> int:
    """64 or 32 where the first key of each of these tiles is a multiple of that, else 0.

    A call of Philox serves 32 weights, whose keys are among 64.
    """
    blocks = () if structure.sparsity is None else (structure.sparsity.kv_block,)
    aligned = gcd(64, *tiles, *blocks)
    return aligned if aligned >= 32 else 0


def fp32_products(structure: Structure) -> str:
    """The way to multiply tiles of float32; "" for tiles of another dtype."""
    return structure.fp32_products if structure.dtype == "float32" else ""


def decays(structure: Structure) -> bool:
    """True if keys may be proven too far behind to count: rule "decay_skip" of mods/rules.py.

    The key that all rows of a tile are known to keep is the last one of all where there is no
    mask, and else the last one of the run's full blocks, which every row of theirs keeps whatever
    mask_mod is.
    """
    if structure.kind != "prefill" or "decay_skip" in structure.rules_off:
        return False
    if structure.dropout:  # the near keys, beside which far ones weigh nothing, may be dropped
        return False
    if structure.sparsity is not None and not structure.sparsity.runs:
        return False
    return structure.terms is not None and structure.terms.rise is not None


def skips_far(structure: Structure, config: Config) -> bool:
    """True if a kernel leaves out keys too far behind; beside a mask, only if it walks its runs.

    Heads that share a tile need other keys each.
    """
    if config.heads > 1:
        return False
    walks = structure.sparsity is None or walks_runs(structure, config)
    return walks and decays(structure)


def loads_tiles(structure: Structure, unit: Unit | None = None) -> bool:
    """True if a mod reads a value of its own for every score, which takes a tile to rearrange.

    unit: of a template that asks a mask_mod once for a unit where each has one answer.
    """
    return any(_loads(expr, by_row=True) for expr in _tiles(structure, unit))


def loads_by_key(structure: Structure, unit: Unit | None = None) -> bool:
    """True if a mod reads a value for every key, the same for all rows of a tile."""
    terms = structure.terms
    column = () if terms is None or terms.column is None else (terms.column,)
    # A column's q_idx is one row, so what it loads is the same for all.
    return any(_loads(expr, by_row=False) for expr in _tiles(structure, unit)) or any(
        _loads(expr, by_row=row) for expr in column for row in (False, True)
    )


def values_by_key(structure: Structure) -> int:
    """The number of values a score_mod reads for every key, each the same for all rows of a tile.

    A dot product with a captured tensor's rows reads one for each of its terms.
    """
    terms = structure.terms
    if terms is None:
        return 0
    parts = [part for part in (terms.core, terms.rest, terms.keep) if part is not None]
    found = {load for part in parts for load in _loads(part, by_row=False)}
    if terms.column is not None:
        found |= {load for row in (False, True) for load in _loads(terms.column, by_row=row)}
    return len(found)


def compares_numbers(structure: Structure) -> bool:
    """True if mods read nothing by key but documents' numbers, which few tiles of runs compare.

    Then they take no registers beside those of the softmax, which are free while they are needed;
    but numbers of 64 bits, or a bound on the keys before them, spill (128x64, D 128, sm_90).
    """
    mask, sparsity, terms = structure.mask, structure.sparsity, structure.terms
    if mask is None or sparsity is None or not sparsity.runs:
        return False
    scored = () if terms is None else (terms.core, terms.column, terms.rest, terms.keep)
    if (terms is not None and terms.diagonal is not None) or any(
        _loads(expr, by_row=row) for expr in scored if expr is not None for row in (False, True)
    ):
        return False
    form = mask_form(mask.mod.expr, INDEX_RANGES)
    narrow = all(buffer.dtype != "int64" for buffer in mask.mod.buffers)
    documents = form.documents
    return form.span.low is None and documents is not None and documents.rest is None and narrow


def loads_diagonals(structure: Structure) -> bool:
    """True if a score_mod reads a value for every diagonal of a tile."""
    terms = structure.terms
    if terms is None or terms.diagonal is None:
        return False
    return any(node.op == "load" for node in walk(terms.diagonal))


def asked_once(mask: Expr, unit: Unit | None) -> bool:
    """True if every unit of a template has one answer of the mask."""
    return unit is not None and same_in_tiles(mask, *unit)


def without_blocks(structure: Structure, unit: Unit) -> Structure:
    """The structure that costs as much: a number or two that scale a tile's scores are free."""
    terms = structure.terms
    if terms is None or structure.max_scores:
        return structure
    rest, factor = terms.of_blocks(unit[0], unit[1] // 2)
    free = factor is not ONE and rest.linear and not rest.added and rest.positive(rest.outer)
    return replace(structure, score=None) if free and not rest.leaves_loop else structure


def _tiles(structure: Structure, unit: Unit | None) -> list[Expr]:
    """The expressions that are computed for every score of a tile."""
    terms = structure.terms
    if terms is not None and unit is not None:
        terms = terms.of_blocks(unit[0], unit[1] // 2)[0]
    found = [] if terms is None else [terms.core, terms.rest, terms.keep]
    mask = None if structure.mask is None else structure.mask.mod.expr
    if mask is not None and not asked_once(mask, unit):
        found.append(mask)
    return [expr for expr in found if expr is not None]


@lru_cache(maxsize=4096)
def _loads(expr: Expr, by_row: bool, head_per_row: bool = False) -> tuple[Expr, ...]:
    """Loads that differ by key, and by row or not."""
    nodes: list[Expr] = list(walk(expr))
    rows = ("score", "q_idx", "h") if head_per_row else ("score", "q_idx")
    per_key, per_row = depending(nodes, ("score", "kv_idx")), depending(nodes, rows)
    return tuple(
        node
        for node in nodes
        if node.op == "load" and node in per_key and (node in per_row) is by_row
    )


def tma_layout(structure: Structure) -> bool:
    """True if q, k and v lie as the bulk copy engine reads them."""
    layout = structure.layout
    contiguous = layout.q_contiguous and layout.k_contiguous and layout.v_contiguous
    return contiguous and layout.aligned
