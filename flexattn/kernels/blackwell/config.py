"""BlackwellPrefillConfig, one variant of the template for tensor memory, and its grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flexattn.kernels.base.config import (
    Language,
    knob,
    power_above,
    tile_for,
)
from flexattn.problem import Structure

# Rows of a tile: the lanes of tensor memory.
LANES = 128
# Warps of a warpgroup: the correction is one, and so is each softmax.
WARPGROUP = 4
# Registers of a thread of a softmax warpgroup, and of the warps that load and multiply.
SOFTMAX_REGISTERS, FEW_REGISTERS = 192, 24
# Columns of one copy of Q or K whose width is no power of two.
_CHUNK = 64
# Columns of the output that a thread has in registers at once.
OUT_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class BlackwellPrefillConfig:
    """Tiles of 128 query rows share tiles of BLOCK_N keys, which a warp loads by TMA.

    BLOCK_N: keys of a tile, 64 or 128.
    num_stages: tiles of K, and of V, in shared memory at once.
    q_tiles: tiles of rows of a program, 1 or 2; default 2. One's softmax then runs beside the
    other's products.
    polynomial: of so many exponentials one is a polynomial on the multipliers; default 0, none.
    packed_heads: heads of a group in the rows of a plan's tile, a power of two up to 64; default
    1.
    """

    BLOCK_N: int
    num_stages: int
    q_tiles: int = 2
    polynomial: int = knob(0, 4, 8, word="polynomial")
    packed_heads: int = 1

    language: ClassVar[Language] = "gluon"
    splits: ClassVar[bool] = False
    softmax_regs: ClassVar[int] = SOFTMAX_REGISTERS

    @property
    def BLOCK_M(self) -> int:
        """Query rows of a program, of each of its heads."""
        return LANES * self.q_tiles // self.packed_heads

    @property
    def heads(self) -> int:
        """Query heads of one tile."""
        return self.packed_heads

    def sliced(self, group: int) -> bool:
        """False: a tile has the same query rows of its heads."""
        return False

    def head_tiles(self, group: int) -> int:
        """Tiles that the heads of a group make for the same query rows."""
        return -(-group // self.packed_heads)

    @property
    def num_warps(self) -> int:
        """Warps that the device starts: those that load and multiply take a warpgroup."""
        return WARPGROUP * (self.q_tiles + 2)


def qk_widths(head_dim: int) -> tuple[int, ...]:
    """The columns of each tile of Q or K: 192 is three tiles of 64."""
    whole = power_above(head_dim)
    return (whole,) if whole == head_dim else (_CHUNK,) * (head_dim // _CHUNK)


def fit_to_mask(config: BlackwellPrefillConfig, structure: Structure) -> BlackwellPrefillConfig:
    """The config with keys that divide the mask's blocks, and one tile of rows if two do not."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    config = replace(config, BLOCK_N=tile_for(config.BLOCK_N, sparsity.kv_block))
    if sparsity.runs or sparsity.q_block % config.BLOCK_M == 0:
        return config
    return replace(config, q_tiles=1)
