"""HopperBackwardConfig: one variant of the warp-specialised backward, as frozen numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flexattn.kernels.base.config import Language
from flexattn.kernels.base.knobs import knob

# Two consumer warpgroups, which share a tile: of 240 registers a thread, beside 24 of the loading
# warps'.
WARPS = 8
CONSUMER_REGISTERS = 240


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig:
    """A block owns BLOCK_N keys and walks the queries BLOCK_M at a time; dq is added up in fp32.

    BLOCK_M: queries of a tile, 64 or 128. BLOCK_N: keys of a tile; 128, of which each warpgroup
    has 64 in registers, or 64, of which both have half the columns each.
    num_stages: tiles of Q, and of dO, in shared memory at once.
    one_head: whether each key head has one query head, of one batch; default False: a block walks
    the queries of all that read its keys. even_keys: whether BLOCK_N divides the keys; default
    False. Both are of a problem's sizes, and spare a counter and a comparison of each score.
    prefetch: whether the next scores are multiplied before dk; default False. They then are there
    when the next step begins, and take registers from then on.
    trailing: whether dk's product may go on when the next step begins; default False. It takes two
    stages or more: the next Q is awaited before this one is given back.
    opaque: whether the addresses of tiles are computed in the loop; default False. Known from
    before it they take registers.
    short: whether the scores' gradients are of weights as rounded for dv; default False. It spares
    the registers of those in fp32.
    dk_operand: where the product of dk has dS from; default "registers". "shared": the tile that
    dq is multiplied from, which costs shared memory's bandwidth and spares registers.
    dq: how a tile of dq gets to global memory; default "red", vectors of 4 by red.global.add from
    registers. "tma": through shared memory, by a bulk reduction that a warp of its own starts.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    one_head: bool = False
    even_keys: bool = False
    prefetch: bool = False
    trailing: bool = knob(False, True, word="trailing")
    short: bool = False
    opaque: bool = knob(False, True, word="opaque")
    dk_operand: Literal["registers", "shared"] = knob("registers", "shared", word="dk-shared")
    dq: Literal["red", "tma"] = "red"

    heads: ClassVar[int] = 1
    num_warps: ClassVar[int] = WARPS
    language: ClassVar[Language] = "gluon"

    @property
    def split(self) -> bool:
        """Whether the warpgroups share the columns of a tile, not its keys."""
        return self.BLOCK_N == 64

    def dq_parts(self, head_dim: int) -> int:
        """Parts of a tile of dq, one product each: 64 registers of a thread hold one."""
        return max(1, self.BLOCK_M * head_dim // (64 * 32 * WARPS))
