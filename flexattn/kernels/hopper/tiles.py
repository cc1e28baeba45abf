"""Tiles: what the Hopper kernel keeps in shared memory, and how wide its copies are."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.device import Device
from flexattn.kernels.base.tiles import walks_runs
from flexattn.kernels.hopper.case import case_of
from flexattn.kernels.hopper.config import HopperPrefillConfig
from flexattn.kernels.hopper.printed import shared_memory
from flexattn.problem import ITEMSIZE, Structure

__all__ = [
    "Tiles",
    "output_and_stages",
    "runs_of",
    "tiles_of",
    "value_bytes",
]


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


def tiles_of(structure: Structure, config: HopperPrefillConfig) -> Tiles:
    """The tiles of a kernel: 192 is three copies of 64, 96 one of 128 with zeros at the end."""
    qk, v = (_power(dim) for dim in (structure.head_dim_qk, structure.head_dim_v))
    if structure.head_dim_qk % 64 == 0 and qk != structure.head_dim_qk:
        return Tiles(64, structure.head_dim_qk // 64, v, 2 if v == 128 else 1)
    halved = qk == v == 256 and config.tile_scheduler != "grid"
    return Tiles(qk, 1, v, 2 if halved else 1)


def value_bytes(structure: Structure, config: HopperPrefillConfig) -> int:
    """Bytes of an element of V as the kernel reads it."""
    return structure.itemsize if config.fp8_pv else ITEMSIZE[structure.out_dtype]


def runs_of(structure: Structure, config: HopperPrefillConfig) -> int:
    """How many rows of a mask's blocks one tile of rows may touch; 0 where lists are walked.

    A tile that no block's rows divide still works on runs: each consumer has those of its own.
    """
    sparsity = structure.sparsity
    if sparsity is None or not walks_runs(structure, config):
        return 0
    return 1 if sparsity.q_block % config.BLOCK_M == 0 else config.consumers


def output_and_stages(
    structure: Structure, config: HopperPrefillConfig, device: Device
) -> tuple[bool, int]:
    """Whether the output has tiles of its own, and how many tiles of Q are held.

    kernels/stated/gluon.py says so, and counts what all of it takes.
    """
    _, own_output, slots = shared_memory(case_of(config, structure, device))
    return own_output, slots


def _power(value: int) -> int:
    return max(64, 1 << (value - 1).bit_length())
