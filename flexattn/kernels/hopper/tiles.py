"""Hopper's tiles: how wide copies are, how they are cut to a mask's blocks, and the grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, power_above, tile_for, walks_runs
from flexattn.kernels.hopper.config import CONSUMER_REGISTERS, CONSUMER_ROWS, HopperPrefillConfig
from flexattn.problem import Problem, Structure

# Columns of Q, K and the output in one TMA copy where head dimensions are any: 128 bytes, which is
# the widest swizzle.
BOX = 64
# Columns of the widest accumulator that two consumers have registers for. Above them Q and K, too,
# are copied in parts.
WIDEST = 256
# Columns of Q and K that one wgmma of 16 bits multiplies.
MMA_K = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes in elements, head dimensions as shared memory holds them.

    qk_width: head dimensions of one copy of Q or K; a tile is cut into qk_chunks of them where its
    width is no power of two. qk_parts: what wgmma multiplies of each, as first column and width.
    v_width: of the accumulator, a power of two; of V, v_columns of them are multiplied. v_box,
    v_boxes: of one copy of V, and how many there are.
    out_chunks: copies of the output, which leaves through tiles like those of Q, or through one
    after the other where a persistent block has no room for more.
    """

    qk_width: int
    qk_chunks: int
    v_width: int
    out_chunks: int
    out_width: int
    qk_parts: tuple[tuple[tuple[int, int], ...], ...]
    v_columns: int
    v_box: int
    v_boxes: int = 1

    @property
    def qk_padded(self) -> int:
        """Head dimensions of Q and K in shared memory."""
        return self.qk_width * self.qk_chunks


def tiles_of(structure: Structure, config: HopperPrefillConfig) -> Tiles:
    """The tiles of a kernel: 192 is three copies of 64, 96 one of 128 with zeros at the end.

    Above 256 they are copies of 64 or 128, and V's columns those of one of v_parts blocks.
    With a v_box 80 is two copies of 64, of which wgmma multiplies 64 + 16 columns.
    """
    qk_dim, v_dim = structure.head_dim_qk, structure.head_dim_v
    qk, v = padded_columns(qk_dim), padded_columns(v_dim)
    if config.v_box:
        starts = range(0, qk_dim, BOX)
        parts = tuple(_powers(min(BOX, whole_boxes(qk_dim - start, MMA_K))) for start in starts)
        multiplied_columns = multiplied(v_dim, config.v_box)
        boxes = -(-v_dim // config.v_box)
        outputs = -(-v_dim // BOX)
        return Tiles(
            BOX, len(parts), v, outputs, BOX, parts, multiplied_columns, config.v_box, boxes
        )
    if qk_dim > WIDEST:
        v, width = (
            padded_columns(-(-v_dim // config.v_parts)),
            part_columns(qk_dim, config.k_parts),
        )
        chunks = qk_dim // width
        return Tiles(width, chunks, v, v // width, width, (((0, width),),) * chunks, v, v)
    if qk_dim % 64 == 0 and qk != qk_dim:
        chunks, outputs = qk_dim // 64, 2 if v == 128 else 1
        return Tiles(64, chunks, v, outputs, v // outputs, (((0, 64),),) * chunks, v, v)
    outputs = 2 if qk == v == 256 and config.persistent else 1
    return Tiles(qk, 1, v, outputs, v // outputs, (((0, qk),),), v, v)


def _powers(width: int) -> tuple[tuple[int, int], ...]:
    """A width as falling powers of two, each with where it starts: 48 is 32 and 16."""
    bits = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return tuple((sum(bits[:i]), size) for i, size in enumerate(bits))


def runs_of(structure: Structure, config: HopperPrefillConfig) -> int:
    """How many rows of a mask's blocks one tile of rows may touch; 0 where lists are walked.

    A tile that no block's rows divide still works on runs: each consumer has those of its own.
    """
    sparsity = structure.sparsity
    if sparsity is None or not walks_runs(structure, config):
        return 0
    return 1 if sparsity.q_block % config.BLOCK_M == 0 else config.consumers


def padded_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory: a power of two of at least 64."""
    return max(64, power_above(head_dim))


def copied_columns(head_dim: int) -> int:
    """Columns of a tile of Q or K, in parts where they are no power of two."""
    return head_dim if head_dim % BOX == 0 else padded_columns(head_dim)


def part_columns(head_dim: int, k_parts: int) -> int:
    """Columns of one copy of Q, K and the output, of head dimensions above WIDEST."""
    return 2 * BOX if head_dim % (2 * BOX * k_parts) == 0 else BOX


def whole_boxes(head_dim: int, box: int) -> int:
    """Columns of as many boxes as cover a head dimension."""
    return -(-head_dim // box) * box


def multiplied(head_dim: int, v_box: int) -> int:
    """Columns of V that wgmma multiplies: N of one is a multiple of 8.

    Boxes narrower than 64 are whole: the manual tells of no N that ends within a swizzle's width.
    """
    return whole_boxes(head_dim, 8 if v_box == BOX else v_box)


def shares_keys(problem: Problem, config: HopperPrefillConfig) -> bool:
    """Whether the heads of a tile are of one group."""
    return problem.Hq // problem.Hkv % config.heads == 0


def grid(problem: Problem, config: HopperPrefillConfig, device: Device) -> Geometry:
    """A program for each row tile of the heads that share one, or one for each SM.

    Raises ConfigError for heads of a tile that do not share keys.
    """
    if not shares_keys(problem, config):
        raise ConfigError(
            f"pack_gqa: {config.heads} heads in a tile of groups of {problem.Hq // problem.Hkv}",
            "the heads of a tile share one KV head",
            "take a number of consumers that divides the group, or pack_gqa=False",
        )
    tiles = -(-problem.q_len // config.BLOCK_M)
    units = problem.B * (problem.Hq // config.heads) * tiles * config.v_parts
    return Geometry(min(units, device.num_sms) if config.persistent else units, tiles, units)


def fit_to_mask(config: HopperPrefillConfig, structure: Structure) -> HopperPrefillConfig:
    """The config with its keys, and its consumers where fewer divide a block, cut to the mask's.

    Along runs it is enough that the rows of one consumer do.
    """
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    config = replace(config, BLOCK_N=tile_for(config.BLOCK_N, sparsity.kv_block))
    one_divides = sparsity.runs and sparsity.q_block % CONSUMER_ROWS == 0
    if one_divides or config.pack_gqa:
        return config
    counts = range(config.consumers, 0, -1)
    dividing = (count for count in counts if sparsity.q_block % (CONSUMER_ROWS * count) == 0)
    return with_consumers(config, next(dividing, config.consumers))


def with_consumers(config: HopperPrefillConfig, count: int) -> HopperPrefillConfig:
    """The config with another number of consumers, each with heads of all its rows."""
    if count == config.consumers:
        return config
    return replace(
        config,
        consumers=count,
        consumer_regs=CONSUMER_REGISTERS.get(count, config.consumer_regs),
        ping_pong=config.ping_pong and count > 1,
        pack_gqa=False,
    )
