"""The symbols that feasibility is stated in, and the numbers that they stand for in one case."""

from __future__ import annotations

from functools import lru_cache

from sympy import Symbol, symbols

from flexattn.device import Device
from flexattn.mods.expr import Expr, depending, walk
from flexattn.problem import Captures, Structure
from flexattn.space.config import ORDERS, Config, DecodeConfig, PrefillConfig, padded, pieces
from flexattn.space.tiles import power_above

# A config's numbers; num_splits is 0 where keys are not split. Then truth values: whether the
# loads go by TMA, and whether the order of the tiles has a meaning.
CONFIG = (BLOCK_M, BLOCK_N, num_warps, num_stages, num_splits, use_tma, known_order) = symbols(
    "BLOCK_M BLOCK_N num_warps num_stages num_splits use_tma known_order"
)
# A problem's sizes. *_padded: elements of a head dimension as its tiles hold them, *_tiles: how
# many these are; mask_*: rows and keys of a BlockMask's block, 0 without one, *_cover: the widest
# tiles that stay inside one.
SIZES = (itemsize, qk_dim, v_dim, qk_padded, v_padded, qk_tiles, v_tiles) = symbols(
    "itemsize qk_dim v_dim qk_padded v_padded qk_tiles v_tiles"
)
BLOCKS = (mask_rows, mask_keys, rows_cover, keys_cover) = symbols(
    "mask_rows mask_keys rows_cover keys_cover"
)
# Truth values of a problem: decodes for the decode template, scalar_products where no matrix
# instruction multiplies the dtype, loads_keys where a mod reads a value for every key, loads_tile
# for every score, dense_layout where tensors lie as TMA needs them.
FACTS = (decodes, scalar_products, loads_keys, loads_tile, dense_layout) = symbols(
    "decodes scalar_products loads_keys loads_tile dense_layout"
)
# A device's bytes of shared memory, 32-bit registers of an SM and of a thread, lanes of a warp.
LIMITS = (shared_limit, sm_registers, thread_registers, warp_size) = symbols(
    "shared_limit sm_registers thread_registers warp_size"
)
ENGINES = (has_tma, has_wgmma, is_hip) = symbols("has_tma has_wgmma is_hip")

SYMBOLS: tuple[Symbol, ...] = (*CONFIG, *SIZES, *BLOCKS, *FACTS, *LIMITS, *ENGINES)
NAMES = tuple(symbol.name for symbol in SYMBOLS)


def numbers(config: Config, structure: Structure, device: Device) -> tuple[int, ...]:
    """What SYMBOLS stand for, in their order; truth values are bools."""
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


@lru_cache(maxsize=1024)
def _fixed(structure: Structure, device: Device) -> tuple[int, ...]:
    qk, v, layout = structure.head_dim_qk, structure.head_dim_v, structure.layout
    rows, keys = 0, 0
    if structure.sparsity is not None:
        rows = structure.sparsity.q_block * structure.packed_heads
        keys = structure.sparsity.kv_block
    sizes = (structure.itemsize, qk, v, padded(qk), padded(v), len(pieces(qk)), len(pieces(v)))
    blocks = (rows, keys, power_above(rows), power_above(keys))
    contiguous = layout.q_contiguous and layout.k_contiguous and layout.v_contiguous
    facts = (
        structure.kind == "decode",
        structure.dtype == "float32" and not structure.tf32,
        loads_by_key(structure),
        loads_tiles(structure),
        contiguous and layout.aligned,
    )
    limits = (device.shared_memory, device.registers, device.max_registers, device.warp_size)
    engines = (device.has_tma, device.has_wgmma, device.backend == "hip")
    return (*sizes, *blocks, *facts, *limits, *engines)


def loads_tiles(structure: Structure) -> bool:
    """Whether a mod reads a value of its own for every score, which takes a tile to rearrange."""
    return any(
        _loads(captures, by_row=True) for captures in (structure.score, structure.mask) if captures
    )


def loads_by_key(structure: Structure) -> bool:
    """Whether a mod reads a value for every key, the same for all rows of a tile."""
    return any(
        _loads(captures, by_row=False)
        for captures in (structure.score, structure.mask)
        if captures
    )


def loads_early(structure: Structure) -> bool:
    """Whether a config's early_loads moves anything: what a score_mod reads by key alone."""
    return structure.score is not None and _loads(
        structure.score, by_row=False, head_per_row=structure.kind == "decode"
    )


def _loads(captures: Captures, by_row: bool, head_per_row: bool = False) -> bool:
    nodes: list[Expr] = list(walk(captures.mod.expr))
    rows = ("score", "q_idx", "h") if head_per_row else ("score", "q_idx")
    per_key, per_row = depending(nodes, ("score", "kv_idx")), depending(nodes, rows)
    return any(
        node.op == "load" and node in per_key and (node in per_row) is by_row for node in nodes
    )
