"""HopperPrefillConfig: one variant of the warp-specialised Hopper template, as frozen numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from flexattn.kernels.base.config import Language
from flexattn.kernels.ptx.assembler import Ptxas

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
# The same of two consumers where the producer copies V in boxes, or K in parts, and keeps a place
# for each.
BOXED_REGISTERS, _BOXED_PRODUCER = 232, 40


@dataclass(frozen=True, slots=True)
class HopperPrefillConfig:
    """Consumer warpgroups of 64 query rows loop over tiles of BLOCK_N keys; a producer warp loads.

    consumers: warpgroups that multiply, 1 to 3, beside the one whose warp loads by TMA.
    BLOCK_N: keys of a tile, a power of two from 16 to 256.
    num_stages: tiles of K, and of V, in shared memory at once, 1 to 8; the loads run that far
    ahead.
    consumer_regs: registers of a consumer's thread, as setmaxnreg gives them; a multiple of 8 from
    24 to 240. The producer warpgroup keeps `producer_regs`.
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
    l2_swizzle: query heads of a section where order is "sections"; default 8. As many as have
    their K and V in L2 together (`section_of` in space.py).
    early_loads: whether what a score_mod reads by key is asked for before the products of the
    scores; default True. It hides the latency and takes registers.
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
    early_loads: bool = True
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
    retired: ClassVar[dict[str, object]] = {"fp8_pv": False}

    language: ClassVar[Language] = "gluon"

    @property
    def heads(self) -> int:
        """Query heads of one tile."""
        return self.consumers if self.pack_gqa else 1

    @property
    def merges(self) -> bool:
        """Whether a pass makes the PTX of one consumer that of all."""
        return self.merge_consumers and self.consumers > 1

    @property
    def persistent(self) -> bool:
        """Whether a block stays, and takes one tile of rows after another."""
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
    def num_warps(self) -> int:
        """Warps that the device starts: the loading one takes a warpgroup of its own."""
        return CONSUMER_WARPS * (self.consumers + 1)

    @property
    def producer_regs(self) -> int:
        """Registers of a thread of the producer warpgroup."""
        many = self.v_box or self.v_parts * self.k_parts > 1
        if many and self.consumers == 2 and self.consumer_regs <= BOXED_REGISTERS:
            return _BOXED_PRODUCER
        return _PRODUCER_REGISTERS.get(self.consumers, 24)
