"""Configs of the Triton backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexattn.kernels.base.config import Language
from flexattn.kernels.base.knobs import knob
from flexattn.kernels.printers.gradient_printer import adds_along_diagonals
from flexattn.mods.expr import reads, walk
from flexattn.problem import Structure


def _loads_for_keys(structure: Structure) -> bool:
    """Whether a score_mod reads memory inside of the loops."""
    if structure.score is None:
        return False
    loads = (each for each in walk(structure.score.mod.expr) if each.op == "load")
    return any(reads(each, "kv_idx") for each in loads)


def serialises(structure: Structure) -> bool:
    """Whether ptxas was seen to serialise the products of such a structure, unguarded."""
    return max(structure.head_dim_qk, structure.head_dim_v) > 128 or _loads_for_keys(structure)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Two halves of one launch, with torch's names for their tiles.

    BLOCK_N1 keys are held for dK and dV, and query rows walked BLOCK_M1 at a time; BLOCK_M2 rows
    are held for dQ, and keys walked BLOCK_N2 at a time. use_tma: what is walked is read through
    tensor descriptors, by the bulk copy engine. sum_diagonals: the gradient of a relative bias is
    summed along each tile's diagonals before it is added up. guarded: whether each loop stands
    behind a condition that it has a turn; default False. A product goes on when a loop ends, and
    of a loop that may have no turn ptxas may see another instruction write its sums: then each
    wgmma of the kernel waits for the one before it (C7515). So it is on Hopper of a learned bias
    by distance, and above 128 columns of almost every call, and there the static defaults have it.
    """

    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    num_warps: int = 4
    num_stages: int = 2
    use_tma: bool = False
    sum_diagonals: bool = knob(True, False, word="scattered", moves=adds_along_diagonals)
    guarded: bool = knob(False, True, word="guarded", moves=serialises)

    heads: ClassVar[int] = 1
    language: ClassVar[Language] = "triton"

    @property
    def BLOCK_M(self) -> int:
        """Query rows of a tile that walks the keys."""
        return self.BLOCK_M2

    @property
    def BLOCK_N(self) -> int:
        """Keys that it walks at a time."""
        return self.BLOCK_N2

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """The tiles by name."""
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
        return tuple((name, getattr(self, name)) for name in names)
