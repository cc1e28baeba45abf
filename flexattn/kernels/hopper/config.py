"""GluonPrefillConfig: one variant of the warp-specialised Hopper template, as frozen numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from flexattn.kernels.base.config import Language
from flexattn.kernels.ptx.assembler import Ptxas

__all__ = [
    "CONSUMER_REGISTERS",
    "CONSUMER_ROWS",
    "GLUON_ORDERS",
    "SCHEDULES",
    "WARPS",
    "GluonOrder",
    "GluonPrefillConfig",
    "Schedule",
]

GluonOrder = Literal["last", "first", "group", "heads", "sections", "alternate"]
Schedule = Literal["grid", "static", "dynamic"]
GLUON_ORDERS: tuple[GluonOrder, ...] = get_args(GluonOrder)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

# A consumer is a warpgroup, one wgmma of which multiplies 64 rows.
CONSUMER_ROWS, WARPS = 64, 4
# Registers of a consumer's thread, and what is left for a thread of the loading warpgroup: an SM
# has 512 for one thread of every warpgroup, and hands them out eight at a time.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}


@dataclass(frozen=True, slots=True)
class GluonPrefillConfig:
    """Consumer warpgroups of 64 query rows each walk the keys BLOCK_N at a time; one warp loads.

    num_stages: tiles of K, and of V, that are held at once. registers: of a consumer's thread.
    ping_pong: the consumers take turns on the tensor cores; long_turns: where units stand apart,
    a turn ends with the exponents of its scores, not with its products, so that one consumer takes
    exponentials while the other makes its exponents. schedule: "grid", a block a tile of
    rows; "static" and "dynamic", one block an SM, which takes the tiles that are its turn, or the
    next that is left. order: as in PrefillConfig; "sections": `section` heads at a time, their
    last rows first, so that the keys of a section stay in L2; "alternate": as "last", every other
    head the other way round. early_loads: as in PrefillConfig.
    q_registers: columns of Q that a consumer keeps in registers, from which its products then read
    them: what shared memory can hand out in a cycle is the limit where heads are wide.
    watched: weights are taken by the maximum of the tiles before; a row's maximum is looked for
    only where its sum of weights shows that it rose. A maximum that is asked for is still exact.
    chained: one loop over the tiles of all units, in which a unit's first scores are multiplied
    beside the last values of the unit before; else they stand before and behind a loop for each
    unit. A block that stays, with room for a second Q, can do either.
    narrow: of e4m3, V and the weights stay so, and each tile's product is added in fp32; else V
    becomes bfloat16 before the kernel.
    merge_consumers: one consumer is compiled, and a pass over its PTX makes that of all of them
    (kernels/hopper/merge_consumers.py): half the compile time, or a third; else each is compiled.
    ptxas: the assembler among those that Triton brings, "" for its own choice.
    packed: the consumers have the same rows of as many heads of a group, each its own head: of few
    query positions a tile is then full, where heads share keys.
    """

    consumers: int
    BLOCK_N: int
    num_stages: int
    registers: int
    ping_pong: bool = False
    schedule: Schedule = "grid"
    order: GluonOrder = "last"
    section: int = 8
    early_loads: bool = True
    q_registers: int = 0
    watched: bool = False
    chained: bool = True
    narrow: bool = False
    long_turns: bool = False
    packed: bool = False
    merge_consumers: bool = True
    ptxas: Ptxas = ""

    language: ClassVar[Language] = "gluon"

    @property
    def heads(self) -> int:
        """Query heads of one tile."""
        return self.consumers if self.packed else 1

    @property
    def merges(self) -> bool:
        """Whether a pass makes the PTX of one consumer that of all."""
        return self.merge_consumers and self.consumers > 1

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
        return WARPS * (self.consumers + 1)

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the loading warpgroup."""
        return _PRODUCER_REGISTERS.get(self.consumers, 24)
