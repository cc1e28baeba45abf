"""Configs of the Triton backward, their tiles against a mask's blocks, and the grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flexattn.kernels.base.amd import AmdHints
from flexattn.kernels.base.arguments import skips_vanished
from flexattn.kernels.base.config import Geometry, Language, knob, tile_for
from flexattn.mods.expr import reads, walk
from flexattn.problem import Problem, Sparsity, Structure


def _loads_for_keys(structure: Structure) -> bool:
    """True if a score_mod reads memory inside of the loops."""
    if structure.score is None:
        return False
    loads = (each for each in walk(structure.score.mod.expr) if each.op == "load")
    return any(reads(each, "kv_idx") for each in loads)


def serialises(structure: Structure) -> bool:
    """True if ptxas was seen to serialise the products of such a structure, unguarded."""
    return max(structure.head_dims) > 128 or _loads_for_keys(structure)


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Two halves of one launch, with torch's names for their tiles.

    BLOCK_N1 keys are held for dK and dV, and query rows walked BLOCK_M1 at a time; BLOCK_M2 rows
    are held for dQ, and keys walked BLOCK_N2 at a time. use_tma: what is walked is read through
    tensor descriptors, by the bulk copy engine. guarded: whether each loop stands
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
    guarded: bool = knob(False, True, word="guarded", moves=serialises)

    # Fields of earlier versions, with the value that every kernel has now.
    retired: ClassVar[dict[str, object]] = {"sum_diagonals": True}

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


@dataclass(frozen=True)
class AmdBackwardConfig(AmdHints, BackwardConfig):
    """A BackwardConfig with hints for AMD's compiler."""


def fit_to_mask(config: BackwardConfig, structure: Structure) -> BackwardConfig:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    return replace(
        config,
        BLOCK_M1=tile_for(config.BLOCK_M1, sparsity.q_block),
        BLOCK_N1=tile_for(config.BLOCK_N1, sparsity.kv_block),
        BLOCK_M2=tile_for(config.BLOCK_M2, sparsity.q_block),
        BLOCK_N2=tile_for(config.BLOCK_N2, sparsity.kv_block),
    )


def reads_runs(structure: Structure, config: BackwardConfig) -> bool:
    """True if the kernel walks a mask's runs, in both directions: whole tiles of whole blocks."""
    sparsity = structure.sparsity
    if sparsity is None or not sparsity.runs:
        return False
    rows, keys = (config.BLOCK_M1, config.BLOCK_M2), (config.BLOCK_N1, config.BLOCK_N2)
    return not any(sparsity.q_block % size for size in rows) and not any(
        sparsity.kv_block % size for size in keys
    )


def skips_blocks(structure: Structure, config: BackwardConfig) -> tuple[int, int] | None:
    """Rows and keys of the tiles that are left out where weights vanish; None where none are.

    The tiles of the kernel's halves, dK with dV and dQ, are multiples of these.
    """
    walks = structure.sparsity is None or reads_runs(structure, config)
    if not walks or not skips_vanished(structure, config):
        return None
    return min(config.BLOCK_M1, config.BLOCK_M2), min(config.BLOCK_N1, config.BLOCK_N2)


def tile_counts(sparsity: Sparsity, config: BackwardConfig) -> dict[str, int]:
    """The number of tiles that cover a block, by the names of a kernel's constants."""
    return {
        "TILES_PER_Q1": -(-sparsity.q_block // config.BLOCK_M1),
        "TILES_PER_KV1": -(-sparsity.kv_block // config.BLOCK_N1),
        "TILES_PER_Q2": -(-sparsity.q_block // config.BLOCK_M2),
        "TILES_PER_KV2": -(-sparsity.kv_block // config.BLOCK_N2),
    }


def backward_grid(problem: Problem, config: BackwardConfig) -> Geometry:
    """Programs for the keys of each KV head, then one for each row tile of each query head."""
    sizes = sizes_of_launch(problem, config)
    units = sizes["q_units"] * sizes["q_tiles"]
    return Geometry(sizes["kv_programs"] + units, sizes["q_tiles"], units)


def sizes_of_launch(problem: Problem, config: BackwardConfig) -> dict[str, int]:
    """Numbers that the kernel takes beside lengths and heads.

    shared_heads: query heads, of all batches, that read the same keys.
    """
    batches = 1 if problem.broadcast_kv else problem.B
    sparsity = problem.structure.sparsity
    kv_tiles = _tiles(problem.kv_len, config.BLOCK_N1, sparsity.kv_block if sparsity else 0)
    q_tiles = _tiles(problem.q_len, config.BLOCK_M2, sparsity.q_block if sparsity else 0)
    kv_units = batches * problem.Hkv
    return {
        "shared_heads": problem.Hq // problem.Hkv * (problem.B // max(batches, 1)),
        "kv_units": kv_units,
        "kv_programs": kv_units * kv_tiles,
        "q_units": problem.B * problem.Hq,
        "q_tiles": q_tiles,
    }


def _tiles(length: int, tile: int, block: int) -> int:
    """Tiles that cover a length; none of them reaches over the end of a block."""
    if not block or block % tile == 0:
        return -(-length // tile)
    per_block = -(-block // tile)
    blocks = -(-length // block)
    return min(per_block, -(-length // tile)) if blocks == 1 else blocks * per_block
