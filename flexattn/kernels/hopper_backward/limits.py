"""Limits of Hopper's backward: what its tiles take of shared memory and registers, and rules."""

from __future__ import annotations

from functools import cached_property

from flexattn.kernels.base.config import TWO_BLOCKS_KEYS
from flexattn.kernels.base.limits import SHARED_MEMORY, TMA_LAYOUT, Limits, Rule, StructureCase
from flexattn.kernels.hopper_backward.config import (
    BACKWARD_REGISTERS,
    EARLY,
    PIPELINED,
    HopperBackwardConfig,
    chunks,
    columns,
    is_lean,
    multiplied_columns,
    value_columns,
)
from flexattn.kernels.hopper_backward.masks import (
    band_and_rest,
    band_of,
    loads_pairs,
    sums_gradients,
    sums_heads,
)
from flexattn.kernels.ptx.assembler import bounds_views
from flexattn.problem import Structure

# Threads of the two consumers, which share a tile.
CONSUMER_THREADS = 256
# Bytes of barriers beside the tiles; registers of addresses and of what is known of rows and keys.
BARRIERS, BESIDE_TILES = 512, 32
# The most registers of a thread that hold a tile of dQ.
DQ_REGISTERS = 64
# The most columns of dQ in tiles of 128 keys of heads above 128 columns.
LEAN_COLUMNS = 192
# The most rows of a box of the copy engine, each of 32 numbers of a tile of dQ.
BOX_ROWS, BOX_COLUMNS = 256, 32


class ConfigCase(StructureCase[HopperBackwardConfig]):
    """A config for a structure on a device."""

    @cached_property
    def columns(self) -> int:
        """Columns of every tile."""
        return columns(self.structure)

    @cached_property
    def lean(self) -> bool:
        """True of tiles of 128 keys whose heads have more than 128 columns."""
        return is_lean(self.structure, self.config)

    @property
    def chunks(self) -> tuple[int, int] | None:
        """Chunks of columns in tiles of 96 keys."""
        return chunks(self.structure, self.config)

    @property
    def mask_blocks(self) -> tuple[int, int]:
        """Rows and keys of a mask's blocks; 0 without a mask."""
        sparsity = self.structure.sparsity
        return (0, 0) if sparsity is None else (sparsity.q_block, sparsity.kv_block)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory."""
        c, itemsize = self.config, self.structure.itemsize
        if self.chunks is not None:
            tiles = sum(self.chunks) * 128 * (c.num_stages * c.BLOCK_M + c.BLOCK_N)
            statistics = c.num_stages * c.BLOCK_M * 8
            return tiles + statistics + 4 * c.BLOCK_M * c.BLOCK_N * itemsize + BARRIERS
        # Q, dO, lse and delta of each stage; K and V.
        width = self.columns + value_columns(self.structure, c)
        walked = c.num_stages * c.BLOCK_M * (width * itemsize + 8)
        held = c.BLOCK_N * width * itemsize
        # dS, and a P a stage where the warpgroups share a tile's columns; two of each by products.
        score_tiles = c.ds_stages
        score_tiles += c.num_stages if c.split else 0
        score_tiles += 3 if c.by_product else 0
        scores = score_tiles * c.BLOCK_M * c.BLOCK_N * itemsize
        # A bit of each weight, and a tile of dQ in float32.
        kept = c.BLOCK_M * c.BLOCK_N // 8 if self.structure.dropout else 0
        dq_tile = 4 * c.BLOCK_M * self.columns if c.dq_tma else 0
        return walked + held + scores + kept + dq_tile + BARRIERS

    @cached_property
    def registers(self) -> int:
        """Registers of a consumer's thread."""
        c = self.config
        if self.chunks is not None:
            # The larger of dK and dV, and scores.
            held = (max(self.chunks) * 64 + c.BLOCK_M) * c.BLOCK_N
            return held // (CONSUMER_THREADS // 2) + BESIDE_TILES
        # By products each warpgroup has one of them, and else both; of tiles' columns all.
        qk, v = map(multiplied_columns, self.structure.head_dims)
        width = 2 * self.columns if c.split else 2 * max(qk, v) if c.by_product else qk + v
        dk_and_dv = c.BLOCK_N * width // CONSUMER_THREADS
        # Of one tile; dP has as many.
        scores = c.BLOCK_M * c.BLOCK_N // CONSUMER_THREADS * (2 if c.by_product else 1)
        if self.lean:
            # Its scores, or their gradients, beside weights in 16 bits.
            return dk_and_dv + scores + scores // 2 + BESIDE_TILES
        dq_tile = c.BLOCK_M * self.columns // CONSUMER_THREADS
        return dk_and_dv + max(2 * scores, scores // 2 + dq_tile) + BESIDE_TILES


def _is_banded(structure: Structure) -> bool:
    """True of a mask in runs that is a band, or none, without what tiles of 96 keys lack."""
    sparsity, mask = structure.sparsity, structure.mask
    lists = sparsity is None or sparsity.runs
    bare = not (structure.score or structure.dropout or structure.ragged_kv)
    return lists and bare and (mask is None or band_and_rest(mask.mod.expr)[1] is None)


def _packs(structure: Structure) -> bool:
    """True if the kernel has for packed sequences what a structure asks for."""
    banded = structure.mask is None or band_of(structure.mask.mod.expr) is not None
    return banded and not structure.dropout


LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    shape=(
        Rule(
            "tile",
            "tiles of {c.config.BLOCK_M} rows and {c.config.BLOCK_N} keys: both are 64 or 128, "
            "and of 64 rows keys may be 96",
            lambda c: (
                c.config.BLOCK_M in (64, 128)
                and (
                    c.config.BLOCK_N in (64, 128)
                    or (c.config.BLOCK_N == TWO_BLOCKS_KEYS and c.config.by_product)
                )
            ),
        ),
        Rule(
            "stages",
            "num_stages={c.config.num_stages} is not between 1 and 4",
            lambda c: 1 <= c.config.num_stages <= 4,
        ),
        Rule(
            "ds_stages",
            "ds_stages={c.config.ds_stages} is not 1 or 2",
            lambda c: c.config.ds_stages in (1, 2),
        ),
        Rule(
            "pipelined",
            "pipelined takes two stages or more: the next Q is awaited before this one is "
            "released",
            lambda c: not c.config.pipelined or c.config.num_stages >= 2,
        ),
        Rule(
            "deterministic",
            "deterministic takes dq_tma: a warp adds what the consumers have left, in its turn",
            lambda c: not c.config.deterministic or c.config.dq_tma,
        ),
        Rule(
            "dq_tma stages",
            "num_stages={c.config.num_stages}: dq_tma takes a hardware barrier of the fourth "
            "stage",
            lambda c: not c.config.dq_tma or c.config.num_stages <= 3,
        ),
        Rule(
            "by_product",
            "by_product takes tiles of 64x64 or 64x96, three stages at most, and nothing that "
            "orders the products of warpgroups that share them",
            lambda c: (
                not c.config.by_product
                or (
                    c.config.BLOCK_M == 64
                    and c.config.BLOCK_N in (64, TWO_BLOCKS_KEYS)
                    and c.config.num_stages <= 3
                    and (c.config.ds_stages == 1 or c.chunks is not None)
                    and not (c.config.pipelined or c.config.dq_tma)
                )
            ),
        ),
        Rule(
            "words",
            "pipelined is dk or empty, and early_lse half, all or empty",
            lambda c: c.config.pipelined in PIPELINED and c.config.early_lse in EARLY,
        ),
    ),
    fit=(
        Rule("arch", "{c.device.arch} has no wgmma", lambda c: c.device.has_wgmma),
        Rule(
            "dtype",
            "Hopper's backward multiplies 16 bits, of one dtype",
            lambda c: c.structure.itemsize == 2 and c.structure.kv_dtype == "",
        ),
        Rule(
            "head dimension",
            "head dimensions ({c.structure.head_dim_qk}, {c.structure.head_dim_v}) are multiples "
            "of 8, and the wider one is from 40 to 256, in Hopper's backward",
            lambda c: (
                32 < max(c.structure.head_dim_qk, c.structure.head_dim_v)
                and c.columns <= 256
                and c.structure.head_dim_qk % 8 == c.structure.head_dim_v % 8 == 0
            ),
        ),
        Rule(
            "dq_tma tile",
            "dq_tma copies a tile of dQ at once: one of {c.config.BLOCK_M}x{c.columns} has more "
            "than 32 KB",
            lambda c: (
                not c.config.dq_tma or c.config.BLOCK_M * c.columns <= BOX_ROWS * BOX_COLUMNS
            ),
        ),
        Rule(
            "dq_halves",
            "dq_halves takes dq_tma and a second warp, which in order adds every other tile, and"
            " for which dropout leaves registers beside tiles of 64x128 alone",
            lambda c: (
                not c.config.dq_halves
                or (
                    c.config.dq_tma
                    and not c.config.deterministic
                    and (
                        not c.structure.dropout
                        or (c.config.BLOCK_M, c.config.BLOCK_N) == (64, 128)
                    )
                )
            ),
        ),
        Rule(
            "persistent",
            "persistent takes dq_tma as a whole, and none of deterministic, pipelined, "
            "by_product and dropout",
            lambda c: (
                not c.config.persistent
                or (
                    c.config.dq_tma
                    and not (c.config.dq_halves or c.config.deterministic or c.config.pipelined)
                    and not (c.config.by_product or c.structure.dropout)
                )
            ),
        ),
        Rule(
            "persistent tiles",
            "persistent stores dK by way of {c.config.ds_stages} tiles of dS of "
            "{c.config.BLOCK_N}x{c.config.BLOCK_M}, which have to hold one of "
            "{c.config.BLOCK_N}x{c.columns}, and dV by one of dQ of {c.config.BLOCK_M} rows",
            lambda c: (
                not c.config.persistent
                or (
                    c.config.ds_stages * c.config.BLOCK_M >= c.columns
                    and 2 * c.config.BLOCK_M >= c.config.BLOCK_N
                )
            ),
        ),
        Rule(
            "dropout stages",
            "num_stages={c.config.num_stages}: dropout takes a hardware barrier of the fourth "
            "stage, and beside dq_tma of the third",
            lambda c: (
                not c.structure.dropout or c.config.num_stages <= (2 if c.config.dq_tma else 3)
            ),
        ),
        TMA_LAYOUT,
        Rule(
            "mask block",
            "the mask's blocks of {c.mask_blocks[0]}x{c.mask_blocks[1]} are no whole tiles of "
            "{c.config.BLOCK_M}x{c.config.BLOCK_N}",
            lambda c: (
                c.mask_blocks[0] % c.config.BLOCK_M == 0
                and (
                    c.mask_blocks[1] % c.config.BLOCK_N == 0
                    or (c.chunks is not None and c.mask_blocks[1] >= c.config.BLOCK_N)
                )
            ),
        ),
        Rule(
            "captured gradients",
            "gradients of what score_mod does not read along q_idx - kv_idx, or in packed "
            "sequences of up to 128 columns by head, are added up by Triton's backward",
            lambda c: (
                sums_gradients(c.structure) and not (c.config.split and sums_heads(c.structure))
            ),
        ),
        Rule(
            "order of captured gradients",
            "gradients of what score_mod captures are added up in any order",
            lambda c: not (c.structure.grads and c.config.deterministic),
        ),
        Rule(
            "by_product gradients",
            "by_product neither drops weights nor adds to gradients of what score_mod captures",
            lambda c: not (c.config.by_product and (c.structure.dropout or c.structure.grads)),
        ),
        Rule(
            "mods",
            "a mod reads memory for each query and key, which Hopper's backward has no tile for,"
            " or not along q_idx - kv_idx, nor the same for a tile of 64 keys",
            lambda c: not loads_pairs(c.structure, c.config.BLOCK_N),
        ),
        Rule(
            "packed sequences",
            "packed sequences have no mask but a band, and no dropout",
            lambda c: not c.structure.ragged_kv or _packs(c.structure),
        ),
        Rule(
            "lean",
            "tiles of 128 keys of heads of more than 128 columns have 64 rows and up to "
            f"{LEAN_COLUMNS} columns of dQ, which threads add, and 128 of V, and no score_mod, "
            "dropout, packed sequences or pipelined",
            lambda c: (
                not c.lean
                or (
                    c.config.BLOCK_M == 64
                    and c.structure.head_dim_qk <= LEAN_COLUMNS
                    and c.structure.head_dim_v <= 128
                    and not (c.structure.score or c.structure.dropout or c.structure.ragged_kv)
                    and not (c.config.dq_tma or c.config.pipelined or c.config.dp_rs)
                )
            ),
        ),
        Rule(
            "views",
            "tiles of 96 keys are views of shared memory that Triton refuses from 3.8 on",
            lambda c: c.chunks is None or not bounds_views(),
        ),
        Rule(
            "keys of two blocks",
            "tiles of 96 keys take 177 to 192 columns of Q and K, up to 192 of V, two stages or "
            "more, no mods but a mask that is a band, in runs of blocks, and neither dropout nor "
            "packed sequences",
            lambda c: (
                c.chunks is None
                or (
                    multiplied_columns(c.structure.head_dim_qk) == LEAN_COLUMNS
                    and c.structure.head_dim_v <= LEAN_COLUMNS
                    and c.config.num_stages >= 2
                    and _is_banded(c.structure)
                )
            ),
        ),
        SHARED_MEMORY,
        Rule(
            "dq",
            "a tile of dQ of {c.config.BLOCK_M}x{c.columns} has more than 64 registers a thread",
            lambda c: c.lean or c.config.BLOCK_M * c.columns <= DQ_REGISTERS * CONSUMER_THREADS,
        ),
        Rule(
            "registers",
            f"about {{c.registers}} registers a thread, consumers have {BACKWARD_REGISTERS}",
            lambda c: c.registers <= BACKWARD_REGISTERS,
        ),
    ),
)
