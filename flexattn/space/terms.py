"""The numbers of one case that the symbols of feasibility stand for."""

from __future__ import annotations

from functools import lru_cache

from flexattn.device import Device
from flexattn.mods.expr import Expr, depending, walk
from flexattn.problem import Structure
from flexattn.space.config import (
    ORDERS,
    Config,
    DecodeConfig,
    GluonPrefillConfig,
    PrefillConfig,
    padded,
    pieces,
)
from flexattn.space.gluon_config import GLUON_ORDERS, SCHEDULES
from flexattn.space.tiles import power_above


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
        *_gluon_fixed(structure, device),
    )


@lru_cache(maxsize=1024)
def _gluon_fixed(structure: Structure, device: Device) -> tuple[int, ...]:
    qk, v, sparsity = structure.head_dim_qk, structure.head_dim_v, structure.sparsity
    blocks = (0, 0, False)
    if sparsity is not None:
        blocks = (sparsity.q_block, sparsity.kv_block, sparsity.runs)
    half = structure.dtype in ("float16", "bfloat16")
    facts = (
        structure.kind == "decode",
        structure.score is not None,
        loads_by_key(structure) or loads_diagonals(structure),
        loads_tiles(structure),
        _dense(structure),
    )
    limits = (device.shared_memory, device.has_wgmma)
    # Tiles of K are copied in parts of 64 columns where their width is no power of two.
    held = (qk if qk % 64 == 0 else _columns(qk), _columns(v))
    return (half, qk, v, *held, *blocks, *facts, *limits)


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
        loads_by_key(structure),
        loads_tiles(structure),
        _dense(structure),
    )
    limits = (device.shared_memory, device.registers, device.max_registers, device.warp_size)
    engines = (device.has_tma, device.has_wgmma, device.backend == "hip")
    return (*sizes, *blocks, *facts, *limits, *engines)


def loads_tiles(structure: Structure) -> bool:
    """Whether a mod reads a value of its own for every score, which takes a tile to rearrange."""
    return any(_loads(expr, by_row=True) for expr in _tiles(structure))


def loads_by_key(structure: Structure) -> bool:
    """Whether a mod reads a value for every key, the same for all rows of a tile."""
    terms = structure.terms
    column = () if terms is None or terms.column is None else (terms.column,)
    # A column's q_idx is one row, so what it loads is the same for all.
    return any(_loads(expr, by_row=False) for expr in _tiles(structure)) or any(
        _loads(expr, by_row=row) for expr in column for row in (False, True)
    )


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


def _tiles(structure: Structure) -> list[Expr]:
    """What is computed for every score of a tile."""
    terms = structure.terms
    found = [] if terms is None else [terms.core, terms.rest, terms.keep]
    found.append(None if structure.mask is None else structure.mask.mod.expr)
    return [expr for expr in found if expr is not None]


def _loads(expr: Expr, by_row: bool, head_per_row: bool = False) -> bool:
    nodes: list[Expr] = list(walk(expr))
    rows = ("score", "q_idx", "h") if head_per_row else ("score", "q_idx")
    per_key, per_row = depending(nodes, ("score", "kv_idx")), depending(nodes, rows)
    return any(
        node.op == "load" and node in per_key and (node in per_row) is by_row for node in nodes
    )
