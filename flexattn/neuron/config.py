"""Configs of the NKI templates, and the on-chip memory that each asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flexattn.device.neuroncore import BANK_BYTES, PARTITIONS
from flexattn.problem import ITEMSIZE, Kind, Problem, Structure

MaskSelect = Literal["range", "affine", "select"]

# Keys of a chunk: they lie on the partitions.
CHUNK = PARTITIONS
# States of query rows that wait for the next section of keys.
MAX_STATES = 32
TRANSPOSE_BUFFERS = 4


@dataclass(frozen=True, slots=True)
class NkiPrefillConfig:
    """BLOCK_M query rows visit BLOCK_N keys at a time, of `section` keys that stay in SBUF.

    score_buffers, value_buffers: tiles in PSUM of QK^T, and of P^T and PV. buffers: working tiles
    in SBUF. kv_buffers: sections in SBUF. mask: how masks are applied where they are simple.
    mixed: float32 tensors are multiplied as bfloat16.
    """

    BLOCK_M: int
    BLOCK_N: int
    section: int = 4096
    score_buffers: int = 2
    value_buffers: int = 1
    buffers: int = 2
    kv_buffers: int = 1
    mask: MaskSelect = "range"
    mixed: bool = False

    num_splits: ClassVar[int] = 1
    kind: ClassVar[Kind] = "prefill"


@dataclass(frozen=True, slots=True)
class NkiDecodeConfig:
    """Rows are query heads of a group and positions; their keys are cut into num_splits.

    Otherwise as in prefill; each split walks its keys a section at a time.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_splits: int = 1
    section: int = 2048
    score_buffers: int = 2
    value_buffers: int = 1
    buffers: int = 2
    kv_buffers: int = 2
    mask: MaskSelect = "range"
    mixed: bool = False

    kind: ClassVar[Kind] = "decode"


NkiConfig = NkiPrefillConfig | NkiDecodeConfig


@dataclass(frozen=True, slots=True)
class NkiShape:
    """The numbers that a config and a problem make of a template.

    section: keys of a section, whole blocks of a mask. chunks: of a section, at most. tile_parts:
    chunks of a tile, at most. pieces, value_pieces: (first, size) of the head dimensions. states:
    of query rows at a time. group: turned chunks of P that one PSUM bank holds. transpose_buffers:
    tiles in PSUM by which heads are transposed.
    """

    section: int
    chunks: int
    tile_parts: int
    pieces: tuple[tuple[int, int], ...]
    value_pieces: tuple[tuple[int, int], ...]
    states: int
    group: int
    transpose_buffers: int
    itemsize: int

    @property
    def value_width(self) -> int:
        """PSUM columns of PV: whole banks, so that two never share one."""
        return 512 * len(self.value_pieces)


def shape_of(problem: Problem, config: NkiConfig) -> NkiShape:
    """The sizes of a kernel: a config applied to a problem."""
    structure = problem.structure
    block = structure.sparsity.kv_block if structure.sparsity else CHUNK
    section = max(block, config.section // block * block)
    whole = -(-problem.kv_len // block) * block
    sections = -(-max(problem.kv_len, 1) // section)
    section = min(section, max(whole, block))
    per_block = -(-block // CHUNK)
    itemsize = 2 if config.mixed else structure.itemsize
    visits = visits_of(problem, config)
    chunks = section // block * per_block
    tile_parts = (
        min((config.BLOCK_N // block + 1) * per_block, chunks)
        if block < config.BLOCK_N
        else -(-config.BLOCK_N // CHUNK)
    )
    return NkiShape(
        section=section,
        chunks=chunks,
        tile_parts=tile_parts,
        pieces=_pieces(structure.head_dim_qk, 128),
        value_pieces=_pieces(structure.head_dim_v, 512),
        states=2 if sections == 1 else max(2, min(visits, MAX_STATES)),
        group=max(1, BANK_BYTES // (config.BLOCK_M * itemsize)),
        transpose_buffers=min(TRANSPOSE_BUFFERS, BANK_BYTES // (128 * itemsize)),
        itemsize=itemsize,
    )


def visits_of(problem: Problem, config: NkiConfig) -> int:
    """Tiles of query rows that share a key head."""
    structure = problem.structure
    heads = problem.Hq // problem.Hkv // structure.packed_heads
    return heads * len(row_tiles(structure, problem.q_len, config.BLOCK_M))


def row_tiles(structure: Structure, q_len: int, height: int) -> list[tuple[int, int]]:
    """(first row, rows) of tiles of which no two rows are in different query blocks of a mask.

    Packed rows run over positions head by head.
    """
    heads, sparsity = structure.packed_heads, structure.sparsity
    rows = q_len * heads
    if sparsity is None or q_len <= sparsity.q_block:
        spans = [(0, rows)]
    else:
        spans = [
            (head * q_len + start, head * q_len + min(start + sparsity.q_block, q_len))
            for head in range(heads)
            for start in range(0, q_len, sparsity.q_block)
        ]
    return [
        (first, min(height, end - first))
        for start, end in spans
        for first in range(start, end, height)
    ]


def memory_of(
    problem: Problem, config: NkiConfig, tiles: dict[str, int], shape: NkiShape | None = None
) -> tuple[int, int]:
    """(SBUF bytes of a partition, PSUM banks) that the template allocates.

    tiles: what the mods ask for, by pool. shape: where it is known. It is what the interpreter
    counts, to the byte.
    """
    shape, s = shape or shape_of(problem, config), problem.structure
    item, out = shape.itemsize, ITEMSIZE[s.dtype]
    turned = len(shape.pieces)
    sbuf = 2 * item * (2 * s.head_dim_qk + turned * config.BLOCK_M)
    sbuf += item * config.kv_buffers * (turned * shape.section + shape.chunks * s.head_dim_v)
    sbuf += item * config.buffers * (config.BLOCK_N + shape.tile_parts * config.BLOCK_M)
    sbuf += shape.states * (12 + 4 * s.head_dim_v)
    sbuf += 16 * config.buffers + 2 * s.head_dim_v * out + 32
    widths = {"s": config.buffers * config.BLOCK_N * 4, "keep": config.BLOCK_N}
    sizes = {"tile_f32": 4, "tile_bf16": 2, "tile_f16": 2, "tile_i32": 4, "tile_u8": 1}
    for pool, count in tiles.items():
        if pool in widths:
            sbuf += widths[pool]
        else:
            sbuf += count * sizes[pool] * config.BLOCK_N if pool in sizes else 4 * count
    banks = 1 + config.value_buffers * len(shape.value_pieces)
    banks += config.score_buffers * -(-config.BLOCK_N // 512)
    banks += -(-config.value_buffers * shape.group * config.BLOCK_M * item // BANK_BYTES)
    return sbuf, banks


def _pieces(size: int, most: int) -> tuple[tuple[int, int], ...]:
    return tuple((first, min(most, size - first)) for first in range(0, size, most))
