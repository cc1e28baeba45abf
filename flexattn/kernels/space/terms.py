"""Facts of a structure that kernels, and what they take, depend on."""

from __future__ import annotations

from functools import lru_cache

from flexattn.device import Device
from flexattn.kernels.space.config import Config, GluonPrefillConfig
from flexattn.kernels.space.gluon_config import CONSUMER_ROWS
from flexattn.kernels.space.tiles import walks_runs
from flexattn.mods.dependence import same_in_tiles
from flexattn.mods.expr import Expr, depending, walk
from flexattn.mods.key_bounds import key_bounds, numbers_of
from flexattn.problem import MAX_HEADS, MAX_LENGTH, Structure

RANGES = {
    "b": (0, MAX_LENGTH), "h": (0, MAX_HEADS), "q_idx": (0, MAX_LENGTH), "kv_idx": (0, MAX_LENGTH)
}  # fmt: skip


def is_dense(structure: Structure) -> bool:
    """Whether q, k and v lie as the bulk copy engine reads them."""
    layout = structure.layout
    contiguous = layout.q_contiguous and layout.k_contiguous and layout.v_contiguous
    return contiguous and layout.aligned


def multiplies_ramp(structure: Structure, device: Device) -> bool:
    """Whether what rises evenly along the keys is one more product of a tile's scores.

    On an H200 ALiBi (causal, D 128, 8k) runs at 0.951 of plain attention so, and at 0.945 with an
    addition for each score.
    """
    multiplies = device.has_wgmma or device.backend == "interpreter"
    if structure.kind != "prefill" or structure.itemsize != 2 or not multiplies:
        return False
    if not structure.positive_scale or "scale" in structure.rules_off:
        return False
    return structure.terms is not None and structure.terms.step is not None


def reaches(structure: Structure) -> bool:
    """Whether keys may be proven too far behind to count: rule "reach" of mods/rules.py.

    The key that all rows of a tile are known to keep is the last one of all where there is no
    mask, and else the last one of the run's full blocks, which every row of theirs keeps whatever
    mask_mod is.
    """
    if structure.kind != "prefill" or structure.fp8 or "reach" in structure.rules_off:
        return False
    if structure.sparsity is not None and not structure.sparsity.runs:
        return False
    return structure.terms is not None and structure.terms.rise is not None


def skips_far(structure: Structure, config: Config) -> bool:
    """Whether a kernel leaves out such keys: of a mask, one that walks its runs.

    Heads that share a tile need other keys each.
    """
    if isinstance(config, GluonPrefillConfig) and config.packed:
        return False
    walks = structure.sparsity is None or walks_runs(structure, config)
    return walks and reaches(structure)


def loads_tiles(structure: Structure, keys: int = 0) -> bool:
    """Whether a mod reads a value of its own for every score, which takes a tile to rearrange.

    keys: of a tile of the Gluon template, which asks a mask_mod once where its tiles have one
    answer each; 0 for the others.
    """
    return any(_loads(expr, by_row=True) for expr in _tiles(structure, keys))


def loads_by_key(structure: Structure, keys: int = 0) -> bool:
    """Whether a mod reads a value for every key, the same for all rows of a tile."""
    terms = structure.terms
    column = () if terms is None or terms.column is None else (terms.column,)
    # A column's q_idx is one row, so what it loads is the same for all.
    return any(_loads(expr, by_row=False) for expr in _tiles(structure, keys)) or any(
        _loads(expr, by_row=row) for expr in column for row in (False, True)
    )


@lru_cache(maxsize=1024)
def values_by_key(structure: Structure) -> int:
    """How many values a score_mod reads for every key, each the same for all rows of a tile.

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


@lru_cache(maxsize=1024)
def compares_numbers(structure: Structure) -> bool:
    """Whether all that mods read by key are documents' numbers, which few tiles of runs compare.

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
    found = key_bounds(mask.mod.expr, RANGES)
    rest = mask.mod.expr if found is None else found.rest
    told = None if rest is None else numbers_of(rest)
    narrow = all(buffer.dtype != "int64" for buffer in mask.mod.buffers)
    return (found is None or found.low is None) and told is not None and not told.rest and narrow


def loads_early(structure: Structure) -> bool:
    """Whether a config's early_loads moves anything: what a score_mod reads by key alone."""
    terms = structure.terms
    if terms is None:
        return False
    if terms.diagonal is not None:
        return loads_diagonals(structure)
    decode = structure.kind == "decode"
    return any(
        _loads(expr, by_row=False, head_per_row=decode)
        for expr in (terms.core, terms.column, terms.rest)
        if expr is not None
    )


def loads_diagonals(structure: Structure) -> bool:
    """Whether a score_mod reads a value for every diagonal of a tile."""
    terms = structure.terms
    if terms is None or terms.diagonal is None:
        return False
    return any(node.op == "load" for node in walk(terms.diagonal))


def asked_once(mask: Expr, keys: int) -> bool:
    """Whether tiles of the Gluon template that have so many keys have one answer each."""
    return keys > 0 and same_in_tiles(mask, CONSUMER_ROWS, keys)


def _tiles(structure: Structure, keys: int) -> list[Expr]:
    """What is computed for every score of a tile."""
    terms = structure.terms
    found = [] if terms is None else [terms.core, terms.rest, terms.keep]
    mask = None if structure.mask is None else structure.mask.mod.expr
    if mask is not None and not asked_once(mask, keys):
        found.append(mask)
    return [expr for expr in found if expr is not None]


def _loads(expr: Expr, by_row: bool, head_per_row: bool = False) -> list[Expr]:
    """Loads that differ by key, and by row or not."""
    nodes: list[Expr] = list(walk(expr))
    rows = ("score", "q_idx", "h") if head_per_row else ("score", "q_idx")
    per_key, per_row = depending(nodes, ("score", "kv_idx")), depending(nodes, rows)
    return [
        node
        for node in nodes
        if node.op == "load" and node in per_key and (node in per_row) is by_row
    ]
