"""Tiles: what the Hopper kernel keeps in shared memory, and how wide its copies are."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.device import Device
from flexattn.kernels.base.features import loads_by_key, loads_diagonals
from flexattn.kernels.base.tiles import walks_runs
from flexattn.kernels.hopper.config import CONSUMER_ROWS, GluonPrefillConfig
from flexattn.problem import ITEMSIZE, Structure

__all__ = [
    "Tiles",
    "own_output",
    "q_slots",
    "reads_shared",
    "runs_of",
    "shared_memory",
    "tiles_of",
    "value_bytes",
]

# Barriers, and what the compiler keeps for starting the warps.
_REST = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes in elements, head dimensions as shared memory holds them.

    qk_width: head dimensions of one copy of Q or K; a tile is cut into qk_chunks of them where its
    width is no power of two. v_width: of one copy of V.
    out_chunks: copies of the output, which leaves through tiles like those of Q, or through one
    after the other where a persistent block has no room for more.
    """

    qk_width: int
    qk_chunks: int
    v_width: int
    out_chunks: int

    @property
    def out_width(self) -> int:
        """Head dimensions of one copy of the output."""
        return self.v_width // self.out_chunks

    @property
    def qk_padded(self) -> int:
        """Head dimensions of Q and K in shared memory."""
        return self.qk_width * self.qk_chunks


def tiles_of(structure: Structure, config: GluonPrefillConfig) -> Tiles:
    """The tiles of a kernel: 192 is three copies of 64, 96 one of 128 with zeros at the end."""
    qk, v = (_power(dim) for dim in (structure.head_dim_qk, structure.head_dim_v))
    if structure.head_dim_qk % 64 == 0 and qk != structure.head_dim_qk:
        return Tiles(64, structure.head_dim_qk // 64, v, 2 if v == 128 else 1)
    halved = qk == v == 256 and config.schedule != "grid"
    return Tiles(qk, 1, v, 2 if halved else 1)


def value_bytes(structure: Structure, config: GluonPrefillConfig) -> int:
    """Bytes of an element of V as the kernel reads it."""
    return structure.itemsize if config.narrow else ITEMSIZE[structure.out_dtype]


def runs_of(structure: Structure, config: GluonPrefillConfig) -> int:
    """How many rows of a mask's blocks one tile of rows may touch; 0 where lists are walked.

    A tile that no block's rows divide still works on runs: each consumer has those of its own.
    """
    sparsity = structure.sparsity
    if sparsity is None or not walks_runs(structure, config):
        return 0
    return 1 if sparsity.q_block % config.BLOCK_M == 0 else config.consumers


def reads_shared(structure: Structure, config: GluonPrefillConfig) -> bool:
    """Whether what a mod reads for keys passes through shared memory to its threads."""
    return loads_by_key(structure, (CONSUMER_ROWS, config.BLOCK_N)) or loads_diagonals(structure)


def shared_memory(structure: Structure, config: GluonPrefillConfig, device: Device) -> int:
    """Bytes of shared memory that the kernel needs, barriers and all."""
    held = _loaded(structure, config) + _written(structure, config, device)
    return held + (q_slots(structure, config, device) - 1) * _query(structure, config)


def own_output(structure: Structure, config: GluonPrefillConfig, device: Device) -> bool:
    """Whether the output has tiles of its own; else it leaves through those of Q.

    A persistent block then loads the next Q while the last output leaves.
    """
    tiles = tiles_of(structure, config)
    if structure.fp8 or tiles.qk_width != tiles.out_width:
        return True
    if tiles.out_chunks > 1:
        return False
    whole = _loaded(structure, config) + _output(structure, config)
    return config.schedule != "grid" and whole <= device.shared_memory


def q_slots(structure: Structure, config: GluonPrefillConfig, device: Device) -> int:
    """How many tiles of Q are held: a persistent block has room for the next one, or has not."""
    if config.schedule == "grid" or not _written(structure, config, device):
        return 1
    held = _loaded(structure, config) + _written(structure, config, device)
    return 2 if held + _query(structure, config) <= device.shared_memory else 1


def _loaded(structure: Structure, config: GluonPrefillConfig) -> int:
    tiles = tiles_of(structure, config)
    held = config.num_stages * config.BLOCK_N
    words = 8 * config.consumers * max(config.BLOCK_N, CONSUMER_ROWS)
    handed = words if reads_shared(structure, config) else 0
    keys = structure.itemsize * tiles.qk_padded * (config.all_rows + held)
    return keys + value_bytes(structure, config) * held * tiles.v_width + handed + _REST


def _query(structure: Structure, config: GluonPrefillConfig) -> int:
    return structure.itemsize * config.all_rows * tiles_of(structure, config).qk_padded


def _output(structure: Structure, config: GluonPrefillConfig) -> int:
    tiles = tiles_of(structure, config)
    parts = tiles.out_chunks if tiles.qk_chunks == 1 else 1
    return ITEMSIZE[structure.out_dtype] * config.all_rows * tiles.v_width // parts


def _written(structure: Structure, config: GluonPrefillConfig, device: Device) -> int:
    """What an output needs that does not leave through Q's tiles."""
    return _output(structure, config) if own_output(structure, config, device) else 0


def _power(value: int) -> int:
    return max(64, 1 << (value - 1).bit_length())
