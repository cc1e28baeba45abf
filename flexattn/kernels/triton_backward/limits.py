"""Limits of the Triton backward: what its tiles take of shared memory and registers, and rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexattn.device import Device
from flexattn.kernels.base.config import padded, pieces
from flexattn.kernels.base.features import tma_layout
from flexattn.kernels.base.limits import Limits, Rule, is_power_of_two
from flexattn.kernels.printers.gradient_printer import adds_along_diagonals
from flexattn.kernels.triton_backward.config import BackwardConfig
from flexattn.problem import Structure

# Bytes of barriers and scratch, beside the tiles; registers of addresses and loop state, beside
# those too.
SHARED_SLACK, REGISTER_SLACK = 2048, 40


@dataclass(eq=False)
class ConfigCase:
    """A config for a structure on a device."""

    config: BackwardConfig
    structure: Structure
    device: Device

    @cached_property
    def qk_padded(self) -> int:
        """Columns of Q and K as tiles hold them."""
        return padded(self.structure.head_dim_qk)

    @cached_property
    def v_padded(self) -> int:
        """Columns of V as tiles hold them."""
        return padded(self.structure.head_dim_v)

    @property
    def wgmma(self) -> bool:
        """Whether warpgroups multiply operands that lie in shared memory."""
        in_16_bits = self.structure.itemsize == 2
        return self.device.has_wgmma and in_16_bits and self.config.num_warps >= 4

    @property
    def has_tma(self) -> bool:
        """Whether the copy engine reads the tiles: of one tile a head dimension, and rows of the
        output of whole 16 bytes.
        """
        dims = self.structure.head_dim_qk, self.structure.head_dim_v
        one = all(len(pieces(dim)) == 1 for dim in dims)
        aligned = self.structure.head_dim_v * self.structure.itemsize % 16 == 0
        return self.device.has_tma and tma_layout(self.structure) and one and aligned

    def _elements(self, held: int, walked: int) -> int:
        """Elements that one half has in shared memory: tiles that are held and walked, weights."""
        stages, width = self.config.num_stages, self.qk_padded + self.v_padded
        if self.device.backend == "hip":  # what is held stays in registers
            return max(1, stages - 1) * walked * width
        if not self.wgmma:
            return (held + max(1, stages - 1) * walked) * width + held * walked
        # Weights stay with the warps that made them, where each has rows of its own.
        apart = held < 16 * self.config.num_warps
        return (held + stages * walked) * width + (held * walked if apart else 0)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory, of the half that takes more."""
        c, itemsize = self.config, self.structure.itemsize
        keys = itemsize * self._elements(c.BLOCK_N1, c.BLOCK_M1)
        queries = itemsize * self._elements(c.BLOCK_M2, c.BLOCK_N2)
        if c.sum_diagonals and adds_along_diagonals(self.structure):
            # Scores are turned through shared memory, in float32 and a buffer a stage.
            queries += 4 * c.num_stages * c.BLOCK_M2 * c.BLOCK_N2
        return max(keys, queries) + SHARED_SLACK

    @cached_property
    def registers(self) -> int:
        """Registers of a thread, of the half that takes more."""
        c, threads = self.config, self.config.num_warps * self.device.warp_size
        keys = c.BLOCK_N1 * (self.qk_padded + self.v_padded) + 2 * c.BLOCK_N1 * c.BLOCK_M1
        queries = c.BLOCK_M2 * self.qk_padded + 2 * c.BLOCK_M2 * c.BLOCK_N2
        found = REGISTER_SLACK + max(keys, queries) // threads
        if self.structure.itemsize == 4:
            # Without matrix instructions operands lie in registers, too.
            rows = max(c.BLOCK_N1 + c.BLOCK_M1, c.BLOCK_M2 + c.BLOCK_N2)
            found += rows * max(self.qk_padded, self.v_padded) // threads // 4
        return found


LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    shape=(
        Rule(
            "tiles",
            "tiles are powers of two of at least 16",
            lambda c: all(size >= 16 and is_power_of_two(size) for _, size in c.config.tiles),
        ),
        Rule(
            "warps",
            "num_warps is 1, 2, 4, 8 or 16",
            lambda c: c.config.num_warps in (1, 2, 4, 8, 16),
        ),
        Rule("stages", "num_stages is at least 1", lambda c: c.config.num_stages >= 1),
        Rule(
            "tma",
            "tensor descriptors need sm_90, heads of one tile, and rows of 16 bytes as they lie",
            lambda c: not c.config.use_tma or c.has_tma,
        ),
        Rule(
            "dtype",
            "inputs of one dtype of 16 or 32 bits have a backward",
            lambda c: not c.structure.fp8 and not c.structure.kv_dtype,
        ),
    ),
    fit=(
        Rule(
            "shared memory",
            "shared memory: about {c.shared_memory} bytes, {c.device.name} has "
            "{c.device.shared_memory}",
            lambda c: c.shared_memory <= c.device.shared_memory,
        ),
        Rule(
            "registers",
            "about {c.registers} registers a thread, {c.device.name} has {c.device.max_registers}",
            lambda c: c.registers <= 2 * c.device.max_registers,
        ),
    ),
    worth=(
        Rule(
            "spills",
            "about {c.registers} registers a thread, {c.device.name} has {c.device.max_registers}",
            lambda c: c.registers <= c.device.max_registers,
        ),
    ),
)
