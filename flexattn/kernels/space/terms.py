"""The numbers of one case that the symbols of feasibility stand for."""

from __future__ import annotations

from functools import lru_cache

from flexattn.device import Device
from flexattn.kernels.space.config import (
    ORDERS,
    Config,
    DecodeConfig,
    GluonPrefillConfig,
    PrefillConfig,
    padded,
    pieces,
)
from flexattn.kernels.space.gluon_config import CONSUMER_ROWS, GLUON_ORDERS, SCHEDULES
from flexattn.kernels.space.tiles import power_above, walks_runs
from flexattn.mods.analysis.dependence import same_in_tiles
from flexattn.mods.analysis.mask_form import mask_form
from flexattn.mods.expr import Expr, depending, walk
from flexattn.problem import INDEX_RANGES, Structure


def numbers(config: Config, structure: Structure, device: Device) -> tuple[int, ...]:
    """What SYMBOLS stand for, in their order; truth values are bools.

    Those of space/stated/gluon.py for a config of the Gluon template, else of symbols.py there.
    """
    if isinstance(config, GluonPrefillConfig):
        return _gluon_numbers(config, structure, device)
    return (
        config.BLOCK_M,
        config.BLOCK_N,
        config.num_warps,
        config.num_stages,
        config.num_splits if isinstance(config, DecodeConfig) else 0,
        isinstance(config, PrefillConfig) and config.use_tma,
        not isinstance(config, PrefillConfig) or config.order in ORDERS,
        *_fixed(structure, device),
    )


def _gluon_numbers(
    config: GluonPrefillConfig, structure: Structure, device: Device
) -> tuple[int, ...]:
    return (
        config.consumers,
        config.BLOCK_N,
        config.num_stages,
        config.registers,
        config.producer_registers,
        config.ping_pong,
        config.schedule != "grid",
        config.order in GLUON_ORDERS and config.schedule in SCHEDULES,
        config.section,
        config.q_registers,
        config.watched,
        1 if config.narrow else 2,
        config.heads,
        *_gluon_fixed(structure, device, config.BLOCK_N),
    )


@lru_cache(maxsize=1024)
def _gluon_fixed(structure: Structure, device: Device, keys: int) -> tuple[int, ...]:
    qk, v, sparsity = structure.head_dim_qk, structure.head_dim_v, structure.sparsity
    blocks = (0, 0, False)
    if sparsity is not None:
        blocks = (sparsity.q_block, sparsity.kv_block, sparsity.runs)
    facts = (
        structure.kind == "decode",
        structure.score is not None,
        loads_by_key(structure, keys) or loads_diagonals(structure),
        loads_tiles(structure, keys),
        _dense(structure),
        sparsity is not None and sparsity.per_head,
        structure.kv_dtype != "",
    )
    limits = (device.shared_memory, device.has_wgmma)
    # Tiles of K are copied in parts of 64 columns where their width is no power of two.
    held = (qk if qk % 64 == 0 else _columns(qk), _columns(v))
    return (structure.itemsize, qk, v, *held, *blocks, *facts, *limits)


def _columns(head_dim: int) -> int:
    return max(64, power_above(head_dim))


def _dense(structure: Structure) -> bool:
    """Whether q, k and v lie as the bulk copy engine reads them."""
    layout = structure.layout
    contiguous = layout.q_contiguous and layout.k_contiguous and layout.v_contiguous
    return contiguous and layout.aligned


@lru_cache(maxsize=1024)
def _fixed(structure: Structure, device: Device) -> tuple[int, ...]:
    qk, v = structure.head_dim_qk, structure.head_dim_v
    rows, keys = 0, 0
    if structure.sparsity is not None:
        rows = structure.sparsity.q_block * structure.packed_heads
        keys = structure.sparsity.kv_block
    sizes = (structure.itemsize, qk, v, padded(qk), padded(v), len(pieces(qk)), len(pieces(v)))
    blocks = (rows, keys, power_above(rows), power_above(keys))
    facts = (
        structure.kind == "decode",
        structure.dtype == "float32" and not structure.tf32,
        loads_by_key(structure) and not compares_numbers(structure),
        loads_tiles(structure),
        multiplies_ramp(structure, device),
        _dense(structure),
    )
    limits = (device.shared_memory, device.registers, device.max_registers, device.warp_size)
    engines = (device.has_tma, device.has_wgmma, device.backend == "hip")
    return (*sizes, *blocks, *facts, *limits, *engines)


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
    form = mask_form(mask.mod.expr, INDEX_RANGES)
    narrow = all(buffer.dtype != "int64" for buffer in mask.mod.buffers)
    documents = form.documents
    return form.span.low is None and documents is not None and documents.rest is None and narrow


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
