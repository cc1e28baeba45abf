"""Limits of the Triton templates for prefill and decode: shared memory, registers, and rules.

What a config takes is fitted to compiled kernels of every arch.
"""

from __future__ import annotations

from functools import cached_property
from math import floor

from flexattn.device import Device, is_rdna
from flexattn.kernels.base import features
from flexattn.kernels.base.amd import KNOWN_HINTS, AmdHints, limited
from flexattn.kernels.base.config import padded, pieces, power_above
from flexattn.kernels.base.limits import (
    NUM_STAGES,
    NUM_WARPS,
    SHARED_MEMORY,
    Limits,
    Rule,
    StructureCase,
    power_of_two,
)
from flexattn.kernels.ptx.assembler import release
from flexattn.kernels.triton.config import ORDERS, AmdPrefillConfig, DecodeConfig, PrefillConfig
from flexattn.problem import Structure

# The widest head dimension of one tile that the copy engine reads.
TMA_WIDEST = 256

# Bytes of barriers, and of scratch of reductions and layout changes, beside the tiles.
SHARED_SLACK = 2048
# Bytes of a float32 number as three of bfloat16.
SPLIT_BYTES = 6

# Registers of addresses, loop state, row statistics and what the mods hold, beside the tiles, by
# the instruction that multiplies.
WGMMA_SLACK, MMA_SLACK, KEYS_SLACK, MFMA_SLACK, FMA_SLACK = 26, 40, 100, 88, 24
WMMA_SLACK, SPLIT_SLACK, WIDE_SLACK, SCORE_SLACK = 24, 24, 63, 24
# The most that rows take of RDNA's: of wide heads they are read again from shared memory.
WMMA_ROWS = 128
# What a mod reads for each key of a tile, before it is used.
GATHER_REGISTERS = 8
# Published tiles of CDNA whose estimates are too high: what Triton 3.9 counts with buffer
# instructions, by arch, head dimension, rows, keys, warps and waves_per_eu. 3.6 spills some.
COUNTED = {
    ("gfx950", 128, 128, 64, 4, 2): 256, ("gfx950", 256, 128, 64, 8, 0): 256,
    ("gfx942", 256, 64, 128, 4, 0): 487, ("gfx942", 256, 128, 64, 4, 0): 509,
}  # fmt: skip
COUNTED_SINCE = (3, 9)


class ConfigCase(StructureCase[PrefillConfig | DecodeConfig]):
    """A case whose device's threads have the registers that hints leave."""

    @property
    def use_tma(self) -> bool:
        """True if tiles are read by the copy engine."""
        return isinstance(self.config, PrefillConfig) and self.config.use_tma

    @property
    def mask_rows(self) -> int:
        """Rows of a mask's block, of heads that share them; 0 without a mask."""
        sparsity = self.structure.sparsity
        return 0 if sparsity is None else sparsity.q_block * self.structure.packed_heads

    @property
    def is_hip(self) -> bool:
        """True if AMD's compiler makes the kernel."""
        return self.device.backend == "hip"

    @property
    def is_measured(self) -> bool:
        """True of CDNA's with one stage, which load nothing ahead, or with a number of waves."""
        hints = self.config
        waves = isinstance(hints, AmdHints) and hints.waves_per_eu > 1
        return self.is_hip and (waves or hints.num_stages == 1)

    # How products are made.

    @cached_property
    def fp32_products(self) -> str:
        """The products of float32: "ieee" without matrix instructions, "bf16x6" as parts."""
        return features.fp32_products(self.structure)

    @property
    def splits(self) -> bool:
        """True if each product is six of bfloat16."""
        return self.fp32_products == "bf16x6"

    @property
    def tall(self) -> bool:
        """True if there are 64 rows and a warpgroup, for instructions of so many."""
        return self.config.BLOCK_M >= 64 and self.config.num_warps >= 4

    @property
    def warpgroups(self) -> bool:
        """True if warpgroups can multiply the tile: 64 rows each, K and V in shared memory."""
        return self.device.has_wgmma and self.tall

    @cached_property
    def wgmma(self) -> bool:
        """True if warpgroups multiply the tile in 16 bits."""
        return self.warpgroups and self.structure.itemsize == 2

    @cached_property
    def split_wgmma(self) -> bool:
        """True if warpgroups multiply it in three parts of bfloat16; Q's parts lie in shared
        memory too.
        """
        return self.warpgroups and self.splits

    @property
    def rows_per_warp(self) -> bool:
        """True if each warp has 16 rows or more of its own."""
        return self.config.BLOCK_M >= 16 * self.config.num_warps

    @cached_property
    def loads_tile(self) -> bool:
        """True if a mod reads a value for each score."""
        return features.loads_tiles(self.structure)

    @property
    def loads_keys(self) -> bool:
        """True if a mod reads a value for each key, beside documents' numbers."""
        structure = self.structure
        return features.loads_by_key(structure) and not features.compares_numbers(structure)

    # Shared memory, in bytes: Q, P on its way to a product, K and V ahead of it; exact but for the
    # slack where nothing is loaded by a mod.

    @property
    def p_tile(self) -> int:
        """P, which stays with the warps that made it where wgmma reads it from registers."""
        tile, itemsize = self.config.BLOCK_M * self.config.BLOCK_N, self.structure.itemsize
        if self.loads_tile:
            return tile * max(itemsize, 4)
        if (self.wgmma or self.split_wgmma) and self.rows_per_warp:
            return 0
        return tile * (SPLIT_BYTES if self.split_wgmma else itemsize)

    @property
    def kv_tiles(self) -> int:
        """K and V."""
        c, itemsize = self.config, self.structure.itemsize
        wider = max(self.qk_padded, self.v_padded)
        if c.num_stages > 1:
            # wgmma reads K and V in place, so the tiles in use count too.
            ahead = c.num_stages if self.wgmma else c.num_stages - 1
            held = ahead * (self.qk_padded + self.v_padded)
        else:
            # One stage holds either of K and V.
            held = 0 if self.splits else wider
        # What is split lies there a second time, as three parts of bfloat16; without wgmma
        # fragments of rows and keys do, of which this is enough.
        parts = SPLIT_BYTES * wider if self.splits else 0
        return c.BLOCK_N * (held * itemsize + parts)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory."""
        itemsize = SPLIT_BYTES if self.split_wgmma else self.structure.itemsize
        q_tile = self.config.BLOCK_M * self.qk_padded * itemsize
        if self.is_hip and self.config.num_stages == 1 and itemsize == 2:
            # Nothing is ahead: each in its turn.
            return max(q_tile, self.kv_tiles, self.p_tile)
        if self.is_hip:
            # Of wide heads P of few rows lies in what K leaves, but where the warps that share
            # rows have keys of their own each: these are exchanged beside it.
            rows, keys = self.config.BLOCK_M, self.config.BLOCK_N
            asked = self.config.matrix_instr_nonkdim if isinstance(self.config, AmdHints) else 0
            matrix_rows = asked or min(rows, 32)
            sharing = self.config.num_warps * matrix_rows // rows
            apart = sharing > 1 and keys >= matrix_rows * sharing
            few = self.v_padded > 128 and rows <= 32 and not apart
            return max(q_tile, self.kv_tiles + (0 if few else self.p_tile))
        return q_tile + self.kv_tiles + self.p_tile + SHARED_SLACK

    @property
    def counted(self) -> int:
        """Registers of a published tile as the compiler counts them; 0 where it was not asked."""
        c, s = self.config, self.structure
        if not isinstance(c, AmdPrefillConfig) or c.num_stages > 1:
            return 0
        plain = s.score is None and not (s.dropout or self.loads_tile or self.loads_keys)
        hints = (c.matrix_instr_nonkdim, c.kpack, c.buffer_loads and s.layout.near)
        if not plain or hints != (0, 1, True) or s.itemsize != 2 or release() < COUNTED_SINCE:
            return 0
        tile = c.BLOCK_M, c.BLOCK_N, c.num_warps, c.waves_per_eu
        return COUNTED.get((self.device.arch, max(s.head_dims), *tile), 0)

    @cached_property
    def registers(self) -> int:
        """Registers of one thread, roughly.

        No config passes that spills in a loop, and few others are refused.
        """
        c = self.config
        if counted := self.counted:
            return counted
        threads = self.device.warp_size * c.num_warps
        words = self.structure.itemsize / 4
        accumulator, scores = c.BLOCK_M * self.v_padded / threads, c.BLOCK_M * c.BLOCK_N / threads
        # Accumulator and scores in fp32, and P.
        made = accumulator + scores + scores * words
        keys = c.BLOCK_N * self.qk_padded / threads
        if self.fp32_products == "ieee":
            # Without matrix instructions a thread holds operands of several steps at once.
            operands = keys * (3 / 2 if c.num_stages > 1 else 1)
            return floor(3 * (made + operands)) + FMA_SLACK
        gathered = 0
        if self.loads_tile:
            gathered = floor(scores) + GATHER_REGISTERS
        elif self.loads_keys:
            gathered = GATHER_REGISTERS
        if self.wgmma:
            return floor(made) + WGMMA_SLACK + 2 * c.num_stages + gathered
        if self.device.has_tensor_memory and self.tall and self.structure.itemsize == 2:
            # Sums are in tensor memory, and pass through registers.
            return floor(made) + MMA_SLACK + gathered
        if self.split_wgmma:
            # A tile's product has sums of its own, and P lies there as three parts.
            return floor(2 * accumulator + 4 * scores) + SPLIT_SLACK
        if is_rdna(self.device):
            # Each half of a wave holds whole operands. Warps beyond the rows share out the keys.
            rows = max(c.BLOCK_M, 16 * c.num_warps)
            shared_keys = c.num_stages * c.BLOCK_N * c.BLOCK_M / rows
            columns = self.qk_padded + self.v_padded
            held_keys = 2 * words * shared_keys * columns / self.device.warp_size
            held_rows = min(2 * words * rows * self.qk_padded / threads, WMMA_ROWS)
            # Divided once, after the sum: a sum of thirds that is whole may end below.
            return floor((4 * made + 2 * held_rows + 2 * held_keys) / 3) + WMMA_SLACK + gathered
        q, keys = c.BLOCK_M * self.qk_padded * words / threads, keys * words
        if self.is_hip:
            # gfx942 holds more of a wide V than its neighbours, and more yet beside a score_mod
            # where warps share rows.
            wide = self.v_padded > 128 and self.device.arch == "gfx942"
            slack = MFMA_SLACK + WIDE_SLACK * wide
            if wide and self.structure.score is not None and not self.rows_per_warp:
                slack += SCORE_SLACK
            return floor(11 / 8 * (made + q + 2 * keys)) + slack
        if not self.rows_per_warp:
            # Warps beyond the rows share out the keys: fragments of K and V, and their addresses.
            return floor(made + 3 / 2 * keys) + KEYS_SLACK
        return floor(made + q + c.BLOCK_N * words / 2) + MMA_SLACK


def case_of(
    config: PrefillConfig | DecodeConfig, structure: Structure, device: Device
) -> ConfigCase:
    """A config for a structure on a device."""
    return ConfigCase(config, structure, limited(device, config))


def _tma_reads(dim: str) -> Rule[ConfigCase]:
    says = f"use_tma: head dimension {{c.structure.{dim}}} is not one tile of at most 256"
    return Rule("tma", says, lambda c: not c.use_tma or _one_tile(getattr(c.structure, dim)))


def _one_tile(head_dim: int) -> bool:
    return len(pieces(head_dim)) == 1 and padded(head_dim) <= TMA_WIDEST


LIMITS: Limits[ConfigCase] = Limits(
    case_of,
    shape=(
        KNOWN_HINTS,
        *map(power_of_two, ("BLOCK_M", "BLOCK_N")),
        NUM_WARPS,
        NUM_STAGES,
        Rule(
            "splits",
            "num_splits={c.config.num_splits} is below 0",
            lambda c: not isinstance(c.config, DecodeConfig) or c.config.num_splits >= 0,
        ),
        Rule(
            "order",
            "the order of {config} is none of those there are",
            lambda c: not isinstance(c.config, PrefillConfig) or c.config.order in ORDERS,
        ),
    ),
    # A tile never spans two blocks of a mask; it may cover one that no tile divides.
    fit=(
        Rule(
            "dtype",
            "float8 is multiplied by the Gluon template alone, on Hopper",
            lambda c: c.structure.itemsize >= 2,
        ),
        Rule(
            "mask block",
            "BLOCK_M={c.config.BLOCK_M} is wider than the mask's block of {c.mask_rows}",
            lambda c: c.structure.sparsity is None or c.config.BLOCK_M <= power_above(c.mask_rows),
        ),
        Rule(
            "mask block",
            "BLOCK_N={c.config.BLOCK_N} is wider than the mask's block of "
            "{c.structure.sparsity.kv_block}",
            lambda c: (
                c.structure.sparsity is None
                or c.config.BLOCK_N <= power_above(c.structure.sparsity.kv_block)
            ),
        ),
        # Of parts of tf32 such took twice the time at D 64, and at D 256 one read beyond its
        # tensors (Triton 3.6).
        Rule(
            "warps",
            "num_warps={c.config.num_warps} share {c.config.BLOCK_M} rows of float32, which "
            "warpgroups split by 64",
            lambda c: not c.split_wgmma or c.rows_per_warp,
        ),
        Rule(
            "tma",
            "use_tma: {c.device.arch} has no TMA",
            lambda c: not c.use_tma or c.device.has_tma,
        ),
        Rule(
            "tma",
            "use_tma: q, k, v must have inner stride 1, the rest multiples of 16 bytes",
            lambda c: not c.use_tma or features.tma_layout(c.structure),
        ),
        *map(_tma_reads, ("head_dim_qk", "head_dim_v")),
        SHARED_MEMORY,
        Rule(
            "registers",
            "registers: about {c.registers} a thread, {c.device.arch} has "
            "{c.device.max_registers}",
            lambda c: c.registers <= c.device.max_registers,
        ),
        # One block must be able to live on an SM.
        Rule(
            "occupancy",
            "occupancy: about {c.registers} registers a thread in {c.config.num_warps} warps, an "
            "SM of {c.device.arch} has {c.device.registers}",
            lambda c: c.registers * c.device.warp_size * c.config.num_warps <= c.device.registers,
        ),
    ),
    worth=(
        # The estimate is of mods as heavy as those measured: heavier ones need room. Where it is
        # steep, what passes has room for the mods that were measured.
        Rule(
            "headroom",
            "headroom: about {c.registers} registers a thread leave few of "
            "{c.device.max_registers}",
            lambda c: (
                is_rdna(c.device)
                or c.split_wgmma
                or c.is_measured
                or 4 * c.registers <= 3 * c.device.max_registers
            ),
        ),
        # Two warps on the same 16 rows pay where the accumulator needs them, and only there; of
        # CDNA published tiles have them, too.
        Rule(
            "idle warps",
            "idle warps: {c.config.num_warps} on {c.config.BLOCK_M} rows",
            lambda c: (
                c.structure.kind == "decode"
                or c.v_padded > 128
                or c.rows_per_warp
                or (c.is_hip and not is_rdna(c.device))
            ),
        ),
        Rule(
            "slower loads",
            "slower loads: TMA could read the tiles",
            lambda c: (
                c.structure.kind == "decode"
                or c.use_tma
                or not c.device.has_tma
                or not features.tma_layout(c.structure)
                or not all(map(_one_tile, c.structure.head_dims))
            ),
        ),
    ),
)
