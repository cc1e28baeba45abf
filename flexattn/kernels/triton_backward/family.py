"""The Triton backward as a family, for every GPU: its limits, defaults and axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from flexattn.device import Device, is_rdna
from flexattn.kernels.base.amd import (
    KNOWN_HINTS,
    as_kind,
    each_hinted,
    hint_words,
    limited,
)
from flexattn.kernels.base.config import Geometry, Language, pieces, turned, words
from flexattn.kernels.base.family import Around, Effort, KernelFamily
from flexattn.kernels.base.features import fp32_products, tma_layout
from flexattn.kernels.base.limits import (
    NUM_WARPS,
    SHARED_MEMORY,
    Limits,
    Rule,
    StructureCase,
    is_power_of_two,
)
from flexattn.kernels.base.source import Source, with_hints
from flexattn.kernels.printers.gradient_printer import adds_along_diagonals
from flexattn.kernels.triton_backward.config import (
    AmdBackwardConfig,
    BackwardConfig,
    backward_grid,
    fit_to_mask,
    serialises,
    sizes_of_launch,
    skips_blocks,
)
from flexattn.kernels.triton_backward.source import render, render_delta, rows_of_delta
from flexattn.problem import Kind, Problem, Structure

# Bytes of barriers and scratch, beside the tiles; registers of addresses and loop state, beside
# those too.
SHARED_SLACK, REGISTER_SLACK = 2048, 40


class ConfigCase(StructureCase[BackwardConfig]):
    """A config for a structure on a device."""

    @property
    def wgmma(self) -> bool:
        """True if warpgroups multiply operands that lie in shared memory."""
        in_16_bits = self.structure.itemsize == 2
        return self.device.has_wgmma and in_16_bits and self.config.num_warps >= 4

    @property
    def has_tma(self) -> bool:
        """True if the copy engine reads the tiles: of one tile a head dimension, and rows of the
        output of whole 16 bytes.
        """
        one = all(len(pieces(dim)) == 1 for dim in self.structure.head_dims)
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
        if adds_along_diagonals(self.structure):
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


def case_of(config: BackwardConfig, structure: Structure, device: Device) -> ConfigCase:
    """A config for a structure on a device, whose threads have the registers that hints leave."""
    return ConfigCase(config, structure, limited(device, config))


LIMITS: Limits[ConfigCase] = Limits(
    case_of,
    shape=(
        KNOWN_HINTS,
        Rule(
            "tiles",
            "tiles are powers of two of at least 16",
            lambda c: all(size >= 16 and is_power_of_two(size) for _, size in c.config.tiles),
        ),
        NUM_WARPS,
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
        SHARED_MEMORY,
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


def _cdna(m1: int, n1: int, m2: int, n2: int) -> BackwardConfig:
    """Tiles of CDNA, whose hints take 7 to 81 registers from them on gfx942 (Triton 3.9)."""
    return AmdBackwardConfig(m1, n1, m2, n2, 4, 1, matrix_instr_nonkdim=16, buffer_loads=True)


def _rdna(m1: int, n1: int, m2: int, n2: int) -> BackwardConfig:
    """Tiles of RDNA, whose matrix instructions have 16 rows."""
    return AmdBackwardConfig(m1, n1, m2, n2, 4, 1, buffer_loads=True)


_Table = dict[int, tuple[BackwardConfig, ...]]

# By the widest head dimension; chosen so that loops compile without spills.
_TABLES: dict[str, _Table] = {
    "sm_90": {
        64: (
            BackwardConfig(64, 128, 128, 128, 8, 3, True),
            BackwardConfig(64, 128, 128, 64, 8, 2),
        ),
        128: (
            BackwardConfig(64, 128, 128, 64, 8, 2, True),
            BackwardConfig(32, 128, 128, 32, 8, 2, True),
            BackwardConfig(32, 128, 128, 32, 8, 2),
            BackwardConfig(64, 64, 64, 64, 8, 2),
        ),
        192: (BackwardConfig(32, 64, 64, 64, 8, 2), BackwardConfig(32, 32, 64, 32, 8, 1)),
        256: (BackwardConfig(32, 32, 64, 32, 8, 2, True), BackwardConfig(32, 32, 64, 32, 8, 1)),
    },
    "sm_100": {
        64: (BackwardConfig(64, 128, 128, 64, 8, 2, True), BackwardConfig(32, 64, 64, 32, 4, 2)),
        128: (
            BackwardConfig(32, 64, 64, 32, 8, 2, True),
            BackwardConfig(32, 64, 64, 32, 8, 2),
            BackwardConfig(16, 64, 64, 32, 4, 2),
        ),
        256: (
            BackwardConfig(32, 32, 64, 32, 8, 2, True),
            BackwardConfig(16, 32, 32, 16, 4, 1),
            BackwardConfig(32, 32, 32, 32, 8, 1),
        ),
    },
    "small": {
        64: (BackwardConfig(32, 64, 64, 32, 4, 2),),
        128: (BackwardConfig(32, 64, 64, 32, 8, 2), BackwardConfig(16, 64, 64, 32, 4, 2)),
        256: (BackwardConfig(16, 32, 32, 16, 4, 1), BackwardConfig(32, 32, 32, 32, 8, 1)),
    },
    "hip": {
        64: (_cdna(64, 64, 64, 64), _cdna(32, 64, 64, 32)),
        128: (_cdna(32, 64, 64, 32), _cdna(16, 64, 64, 16)),
        256: (_cdna(16, 32, 32, 16),),
    },
    "rdna": {
        64: (_rdna(16, 32, 32, 16),),
        128: (_rdna(16, 16, 16, 16),),
        256: (BackwardConfig(16, 16, 16, 16, 8, 1),),
    },
}
# Where the gradient of a relative bias is summed along diagonals, on sm_90 up to 64 and up to 128
# columns: sums take registers and shared memory, with which the table's first ones spill.
_DIAGONALS = (
    BackwardConfig(64, 128, 128, 64, 8, 2, True),
    BackwardConfig(32, 128, 128, 32, 8, 2, True),
)
# Without matrix instructions what is multiplied lies in registers: beyond 64 wide tiles spill.
_FLOAT32 = (BackwardConfig(32, 32, 32, 32, 8, 1), BackwardConfig(16, 32, 32, 16, 4, 1))
# Of parts of bfloat16, up to 64 and up to 128 columns.
_PARTS = (BackwardConfig(32, 64, 64, 32, 4, 1), BackwardConfig(16, 32, 32, 16, 8, 1))
_SMALLEST = (BackwardConfig(16, 16, 16, 16, 4, 1), BackwardConfig(16, 16, 16, 16, 8, 1))


def defaults(problem: Problem, device: Device) -> Iterator[BackwardConfig]:
    """Configs by preference, the smallest tiles last."""
    structure = problem.structure
    widest = max(structure.head_dims)
    if (products := fp32_products(structure)) == "bf16x6":
        yield _PARTS[widest > 64]
        yield from _SMALLEST
    elif products:
        yield from _FLOAT32 if widest <= 64 else ()
        yield from reversed(_SMALLEST)
    else:
        table = next((found for limit, found in _table(device).items() if widest <= limit), ())
        if structure.dropout and widest > 64:
            # Random bits take registers: of 64 rows at a time the loops of sm_90 spill.
            table = tuple(replace(each, BLOCK_M1=min(each.BLOCK_M1, 32)) for each in table)
        if device.arch == "sm_90" and widest <= 128 and adds_along_diagonals(structure):
            table = (_DIAGONALS[widest > 64], *table)
        guarded = device.has_wgmma and serialises(structure)
        yield from (replace(each, guarded=guarded) for each in table)
        yield BackwardConfig(16, 32, 32, 16, 4, 1)
        yield from _SMALLEST


def axes(problem: Problem, device: Device, every: bool) -> Iterator[BackwardConfig]:
    """The configs that a search may try."""
    held = (32, 64, 128) if every else (64, 128)
    walked = (16, 32, 64, 128) if every else (32, 64)
    stages = (1, 2, 3) if every else (2, 3)
    stages = (1, 2) if device.backend == "hip" else stages
    if is_rdna(device):
        held, walked = (16, 32, 64), (16, 32)
    tma = (False, True) if device.has_tma else (False,)
    for n1, m2, m1, n2, warps, depth in product(held, held, walked, walked, (4, 8), stages):
        yield from (BackwardConfig(m1, n1, m2, n2, warps, depth, each) for each in tma)


def _table(device: Device) -> _Table:
    if device.backend == "hip":
        return _TABLES["rdna" if is_rdna(device) else "hip"]
    arch = "sm_100" if device.has_tensor_memory else device.arch
    return _TABLES.get(arch, _TABLES["small"])


class _Backward(KernelFamily[BackwardConfig]):
    name = "triton_backward"
    kind: Kind = "backward"
    language: Language = "triton"
    limits = LIMITS

    def defaults(self, problem: Problem, device: Device) -> Iterator[BackwardConfig]:
        found = (fit_to_mask(each, problem.structure) for each in defaults(problem, device))
        hip = device.backend == "hip"
        return (as_kind(each, AmdBackwardConfig) for each in found) if hip else found

    def axes(self, problem: Problem, device: Device, effort: Effort) -> Iterator[BackwardConfig]:
        every = effort == "exhaustive"
        for each in each_hinted(axes(problem, device, every), AmdBackwardConfig, device, every):
            yield from turned(fit_to_mask(each, problem.structure), problem.structure)

    fit_to_mask = staticmethod(fit_to_mask)

    def options_of(self, config: BackwardConfig) -> dict[str, int | bool | str]:
        names = (*dict(config.tiles), "num_warps", "num_stages")
        return {f"bwd_{name}": getattr(config, name) for name in names}

    def grid(self, problem: Problem, config: BackwardConfig, device: Device) -> Geometry:
        return backward_grid(problem, config)

    def render(
        self, structure: Structure, config: BackwardConfig, device: Device, title: str
    ) -> Source:
        return with_hints(render(structure, config, device, title), config, structure)

    def bind(self, problem: Problem, config: BackwardConfig, grid: Geometry) -> dict[str, Any]:
        return sizes_of_launch(problem, config)

    def around(self, problem: Problem, config: BackwardConfig, device: Device) -> Around:
        structure = problem.structure
        before, through_lse = (render_delta(structure, device, each) for each in (False, True))
        tiles = -(-problem.q_len // rows_of_delta(structure))
        blocks = skips_blocks(structure, config)
        return Around((before, through_lse), problem.B * problem.Hq * tiles, blocks=blocks)

    def launch_key(self, config: BackwardConfig) -> tuple[object, ...]:
        return *config.tiles, config.num_warps

    def short(self, config: BackwardConfig) -> str:
        """64x128 128x64 w8 s2: of each half, the rows and the keys."""
        c = config
        tiles = f"{c.BLOCK_M1}x{c.BLOCK_N1} {c.BLOCK_M2}x{c.BLOCK_N2}"
        tma = ["tma"] * c.use_tma
        tiles += f" w{c.num_warps} s{c.num_stages}"
        return " ".join([tiles, *tma, *hint_words(config), *words(config)])


BACKWARD = _Backward()
