"""HopperPrefillConfig, one variant of the warp-specialised template, and the tiles it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, Language, power_above, tile_for
from flexattn.kernels.base.ragged import RaggedConfig
from flexattn.kernels.ptx.assembler import Ptxas
from flexattn.problem import Problem, Structure
from flexattn.problem.serving import ServingForm, ServingProblem

HopperOrder = Literal["last", "group", "heads", "sections"]
TileScheduler = Literal["grid", "static", "dynamic"]
HOPPER_ORDERS: tuple[HopperOrder, ...] = get_args(HopperOrder)
TILE_SCHEDULERS: tuple[TileScheduler, ...] = get_args(TileScheduler)

# A consumer is a warpgroup, one wgmma of which multiplies 64 rows.
CONSUMER_ROWS, CONSUMER_WARPS = 64, 4
# Registers of a consumer's thread, and of a thread of the producer warpgroup, as setmaxnreg gives
# them: together within the 512 that an SM has for one thread of every warpgroup.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}
# The most registers of the one consumer of a block of which an SM holds two, each of 120 a thread.
TWO_BLOCKS_REGISTERS, TWO_BLOCKS_THREAD = 200, 120
# The same of two consumers where the producer copies V in boxes, or K in parts, and keeps a place
# for each; and where its four warps copy keys by cp.async. They may have the most that the two
# leave of what three warpgroups start with.
BOXED_REGISTERS, GATHERING_REGISTERS, _MOST_OF_PRODUCER, STARTED_WITH_TWO = 232, 224, 56, 3 * 168


@dataclass(frozen=True, slots=True)
class HopperPrefillConfig:
    """Consumer warpgroups of 64 query rows loop over tiles of BLOCK_N keys; a producer warp loads.

    A search varies consumers, BLOCK_N, num_stages, order, lazy_rescale, pack_gqa, merge_consumers
    and ptxas. The rest follows from them and the structure: `completed` in space.py.

    consumers: warpgroups that multiply, 1 to 3, beside the one whose warp loads by TMA.
    BLOCK_N: keys of a tile, a power of two from 16 to 256.
    num_stages: tiles of K, and of V, in shared memory at once, 1 to 8; the loads run that far
    ahead.
    consumer_regs: registers of a consumer's thread, as setmaxnreg gives them; a multiple of 8 from
    24 to 240. The producer warpgroup keeps `producer_regs`. Two blocks of one consumer each share
    an SM if it has at most 200: one multiplies beside the other's softmax.
    ping_pong: whether the consumers alternate on the tensor cores, by named barriers; default
    False. One consumer's softmax then runs beside the other's products (FlashAttention-3).
    ping_pong_softmax: whether a consumer's turn ends after the exponentials of its scores, not
    its products; default False. It counts beside ping_pong, where cross_tile_pipeline is off:
    softmaxes of many steps are then 2 to 6 % faster on an H200.
    tile_scheduler: who takes which tile of rows; default "grid", a block a tile. "static": one
    block an SM, with every num_sms-th tile; "dynamic": one block an SM, which takes the next tile
    of a counter. A block that stays loads its next Q early; a counter evens out masks.
    order: which tiles start first; default "last", a head's last rows, head after head. "group"
    and "heads": as in PrefillConfig. "sections": `l2_swizzle` heads at a time, their last rows
    first.
    l2_swizzle: query heads of a section where order is "sections"; default 8.
    q_in_regs: columns of Q that a consumer keeps in registers, as the A operand of wgmma: 0, half
    of them or all; default 0. For wide heads shared memory's bandwidth is the limit.
    lazy_rescale: whether the accumulator is rescaled only where a row's maximum rose by much;
    default False. Weights are taken by the maximum of the tiles before, and a row's sum of weights
    shows whether it rose: 2 to 11 % faster on an H200. A max_scores that is returned stays exact.
    cross_tile_pipeline: whether the first scores of a tile of rows are multiplied beside the last
    values of the tile before, in one loop over both; default True. Else the pipeline drains
    between them. Only a block that stays and has room for a second Q can do either.
    pack_gqa: whether the consumers hold the same query rows of as many heads of one KV group;
    default False: 64 rows each of one head. Fills a tile where query positions are few.
    v_box: columns of V of one TMA copy, 16, 32 or 64, where head dimensions are multiples of 8: Q,
    K and the output are then copied in boxes of 64, filled with zeros, and wgmma multiplies no
    more columns than there are. Default 0: tiles as wide as a power of two.
    v_parts: blocks that share the columns of V and the output where they are more than 256; each
    multiplies the scores again. Default 1.
    k_parts: parts of a tile of K, each of some columns, that are loaded and released one by one
    where head dimensions are above 256; default 1. With one stage the next tile arrives behind
    the products of this one.
    merge_consumers: whether one consumer is compiled, and a pass over its PTX makes that of all
    (kernels/hopper/merge_consumers.py); default True, which halves the time to compile.
    ptxas: the assembler among those that Triton brings; default "", its own choice.
    """

    consumers: int
    BLOCK_N: int
    num_stages: int
    consumer_regs: int
    ping_pong: bool = False
    tile_scheduler: TileScheduler = "grid"
    order: HopperOrder = "last"
    l2_swizzle: int = 8
    q_in_regs: int = 0
    lazy_rescale: bool = False
    cross_tile_pipeline: bool = True
    ping_pong_softmax: bool = False
    pack_gqa: bool = False
    v_box: int = 0
    v_parts: int = 1
    k_parts: int = 1
    merge_consumers: bool = True
    ptxas: Ptxas = ""

    # Fields of earlier versions, with the value that every kernel has now.
    retired: ClassVar[dict[str, object]] = {"fp8_pv": False, "early_loads": True}

    language: ClassVar[Language] = "gluon"

    @property
    def heads(self) -> int:
        """Query heads of one tile."""
        return self.consumers if self.pack_gqa else self.packed_heads

    @property
    def packed_heads(self) -> int:
        """Query heads of one consumer's rows."""
        return 1

    @property
    def splits(self) -> bool:
        """True if keys of a tile may be cut into parts."""
        return False

    def sliced(self, group: int) -> bool:
        """True if a plan's consumers take slices in turn: 64 rows of each head, then the next 64.

        A tile ends anywhere in a group, so heads that consumers do not divide fill tiles, too.
        """
        return self.pack_gqa and group % self.consumers > 0

    def head_tiles(self, group: int) -> int:
        """Tiles that the heads of a group make for the same query rows; 1 of slices."""
        return 1 if self.sliced(group) else -(-group // self.heads)

    @property
    def merges(self) -> bool:
        """True if a pass makes the PTX of one consumer that of all."""
        return self.merge_consumers and self.consumers > 1

    @property
    def persistent(self) -> bool:
        """True if a block stays, and takes one tile of rows after another."""
        return self.tile_scheduler != "grid"

    @property
    def BLOCK_M(self) -> int:
        """Query rows of one tile, of each of its heads."""
        return CONSUMER_ROWS * self.consumers // self.heads

    @property
    def all_rows(self) -> int:
        """Query rows of one tile, of all its heads."""
        return CONSUMER_ROWS * self.consumers

    @property
    def per_sm(self) -> int:
        """Blocks that share an SM: two of one consumer, if it leaves registers for both."""
        return 1 + (self.consumers == 1 and self.consumer_regs <= TWO_BLOCKS_REGISTERS)

    @property
    def num_warps(self) -> int:
        """Warps that the device starts: the loading one takes a warpgroup of its own."""
        return CONSUMER_WARPS * (self.consumers + 1)

    @property
    def producer_regs(self) -> int:
        """Registers of a thread of the producer warpgroup."""
        many = self.v_box or self.v_parts * self.k_parts > 1
        if many and self.consumers == 2:
            return min(STARTED_WITH_TWO - 2 * self.consumer_regs, _MOST_OF_PRODUCER)
        return _PRODUCER_REGISTERS.get(self.consumers, 24)


@dataclass(frozen=True, slots=True)
class RaggedPrefillConfig(HopperPrefillConfig):
    """A plan's: its rows are cut by requests, and its keys lie in pages.

    packed_heads: heads of a group in the rows of a tile, a power of two up to 64; default 1. Row r
    is of head r % packed_heads; what is above a group's last head is no row. Mods that read the
    head have pack_gqa instead, where each consumer has one; so have groups of odd size, see
    `sliced`. splits: whether the device may cut a
    tile's keys into parts for several SMs, which another kernel merges; default False.
    """

    packed_heads: int = 1
    splits: bool = False


# Parts into which a tile is cut whose keys are one SM's share of all.
PARTS_OF_SHARE = 2
# Columns of Q, K and the output in one TMA copy where head dimensions are any: 128 bytes, which is
# the widest swizzle.
BOX = 64
# Columns of the widest accumulator that two consumers have registers for. Above them Q and K, too,
# are copied in parts.
WIDEST = 256
# Columns of Q and K that one wgmma of 16 bits multiplies.
MMA_K = 16


class Tiles(NamedTuple):
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
    In eight bits each is one copy, of a power of two.

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
    if qk_dim % 64 == 0 and qk != qk_dim and not structure.fp8:
        chunks, outputs = qk_dim // 64, 2 if v == 128 else 1
        return Tiles(64, chunks, v, outputs, v // outputs, (((0, 64),),) * chunks, v, v)
    outputs = 2 if qk == v == 256 and config.persistent else 1
    return Tiles(qk, 1, v, outputs, v // outputs, (((0, qk),),), v, v)


def _powers(width: int) -> tuple[tuple[int, int], ...]:
    """A width as falling powers of two, each with where it starts: 48 is 32 and 16."""
    bits = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return tuple((sum(bits[:i]), size) for i, size in enumerate(bits))


def padded_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory: a power of two of at least 64."""
    return max(64, power_above(head_dim))


def copied_columns(head_dim: int, whole: bool = False) -> int:
    """Columns of a tile of Q or K, in parts where they are no power of two. whole: in no parts."""
    return head_dim if head_dim % BOX == 0 and not whole else padded_columns(head_dim)


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
    """True if the heads of a tile are of one group."""
    whole = problem.Hq // problem.Hkv % config.heads == 0
    return not config.pack_gqa or whole or isinstance(problem, ServingProblem)


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
    if isinstance(problem, ServingProblem):
        # Each request may end within a tile.
        form = problem.structure
        rows = problem.rows // config.BLOCK_M + problem.B
        if config.sliced(form.group):
            rows = rows * form.group // config.consumers + problem.B
        rows += split_slots(form, config, device)
        units = rows * problem.Hkv * config.head_tiles(form.group)
        return Geometry(min(units, device.num_sms), rows, units)
    tiles = -(-problem.q_len // config.BLOCK_M)
    units = problem.B * (problem.Hq // config.heads) * tiles * config.v_parts
    blocks = device.num_sms * config.per_sm
    return Geometry(min(units, blocks) if config.persistent else units, tiles, units)


def split_slots(form: ServingForm, config: RaggedConfig, device: Device) -> int:
    """Parts of tiles of rows that there is memory for, each of all heads; 0 without splits.

    Those that are cut have no more keys than all have, so they have no more parts.
    """
    if not config.splits:
        return 0
    return PARTS_OF_SHARE * device.num_sms // (form.kv_heads * config.head_tiles(form.group)) + 1


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
