"""Blackwell's prefill as a family: chosen by BACKEND="GLUON" alone until somebody measures it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flexattn.device import Device
from flexattn.errors import ConfigError
from flexattn.kernels.base.config import Geometry, Language
from flexattn.kernels.base.family import Effort, KernelFamily
from flexattn.kernels.base.limits import (
    KEYS_OF_BLOCK,
    NUM_STAGES,
    SHARED_MEMORY,
    TMA_LAYOUT,
    Limits,
    Rule,
    StructureCase,
)
from flexattn.kernels.base.ragged import form_of, lacks, packed_heads, packs, prefill_rows
from flexattn.kernels.blackwell.config import (
    LANES,
    OUT_COLUMNS,
    BlackwellPrefillConfig,
    fit_to_mask,
)
from flexattn.kernels.blackwell.source import render
from flexattn.problem import Kind, Problem
from flexattn.problem.serving import ServingProblem

# Columns of 32 bits that an SM has; allocations are powers of two.
TENSOR_COLUMNS = 512
# Head dimensions of Q and K, and of V, that tiles were made for.
_QK_DIMS, _V_DIMS = (64, 128, 192, 256), (64, 128, 256)
# Bytes: barriers, and what the compiler keeps for starting the warps.
SHARED_SLACK = 2048
# Registers beside scores and weights: addresses, loop state, a row's statistics.
REGISTER_SLACK = 16


@dataclass(eq=False)
class ConfigCase(StructureCase[BlackwellPrefillConfig]):
    """A config for a structure on a device."""

    @cached_property
    def tensor_columns(self) -> int:
        """Columns of tensor memory: scores and outputs of every tile of rows, in float32."""
        return self.config.q_tiles * (self.config.BLOCK_N + self.structure.head_dim_v)

    @cached_property
    def shared_memory(self) -> int:
        """Bytes: Q, stages of K and V, a part of each output, row values."""
        s, c = self.structure, self.config
        q = c.q_tiles * LANES * s.head_dim_qk
        keys = c.num_stages * c.BLOCK_N * (s.head_dim_qk + s.head_dim_v)
        out = c.q_tiles * LANES * OUT_COLUMNS
        row_values = 4 * 4 * c.q_tiles * LANES
        return (q + keys + out) * s.itemsize + row_values + SHARED_SLACK

    @property
    def lacking(self) -> str:
        """The part of a plan that the template does not have; "" of a call's."""
        form = form_of(self.structure)
        asked = {} if form is None else lacks(form, self.config)
        if form is not None:
            asked |= {"scales": form.scaled, "packed sequences": form.ragged_kv}
        return next((what for what, holds in asked.items() if holds), "")

    @cached_property
    def registers(self) -> int:
        """Registers of a softmax warp's thread, which has a row of scores and of weights."""
        return self.config.BLOCK_N * 5 // 4 + REGISTER_SLACK


LIMITS: Limits[ConfigCase] = Limits(
    ConfigCase,
    shape=(
        Rule(
            "keys",
            "BLOCK_N={c.config.BLOCK_N} is not 64 or 128",
            lambda c: c.config.BLOCK_N in (64, 128),
        ),
        NUM_STAGES,
        Rule(
            "tiles of rows",
            "q_tiles={c.config.q_tiles} is not 1 or 2",
            lambda c: c.config.q_tiles in (1, 2),
        ),
        Rule(
            "polynomial",
            "polynomial={c.config.polynomial} is not 0, or a power of two from 2 to 16",
            lambda c: c.config.polynomial in (0, 2, 4, 8, 16),
        ),
    ),
    fit=(
        Rule(
            "arch",
            "{c.device.arch} has no tensor memory: the template is for sm_100 to sm_110",
            lambda c: c.device.has_tensor_memory,
        ),
        Rule(
            "prefill",
            "the Gluon template for Blackwell is for prefill",
            lambda c: c.structure.kind in ("prefill", "serving"),
        ),
        Rule(
            "serving",
            "the Gluon template for Blackwell does not have {c.lacking}",
            lambda c: c.lacking == "",
        ),
        Rule(
            "dtype",
            "the Gluon template for Blackwell multiplies float16 and bfloat16",
            lambda c: (
                c.structure.itemsize == 2 and c.structure.kv_dtype in ("", c.structure.dtype)
            ),
        ),
        Rule(
            "head dimension",
            "head dimension {c.structure.head_dim_qk} is not one of 64, 128, 192, 256",
            lambda c: c.structure.head_dim_qk in _QK_DIMS,
        ),
        Rule(
            "head dimension",
            "head dimension {c.structure.head_dim_v} of V is not one of 64, 128, 256",
            lambda c: c.structure.head_dim_v in _V_DIMS,
        ),
        TMA_LAYOUT,
        Rule(
            "dropout",
            "the Gluon template for Blackwell has no dropout",
            lambda c: not c.structure.dropout,
        ),
        Rule(
            "tensor memory",
            "tensor memory: {c.tensor_columns} columns, an SM has " + str(TENSOR_COLUMNS),
            lambda c: c.tensor_columns <= TENSOR_COLUMNS,
        ),
        Rule(
            "mask block",
            "a tile of {c.config.BLOCK_M} rows does not divide the mask's block of "
            "{c.structure.sparsity.q_block}",
            lambda c: (
                c.structure.sparsity is None
                or c.structure.sparsity.q_block % c.config.BLOCK_M == 0
                or (c.structure.sparsity.runs and c.structure.sparsity.q_block % LANES == 0)
            ),
        ),
        KEYS_OF_BLOCK,
        SHARED_MEMORY,
        Rule(
            "registers",
            "registers: about {c.registers} a thread, a softmax warp has {c.config.softmax_regs}",
            lambda c: c.registers <= c.config.softmax_regs,
        ),
    ),
)


class _Prefill(KernelFamily[BlackwellPrefillConfig]):
    name = "blackwell"
    kind: Kind = "prefill"
    language: Language = "gluon"
    limits = LIMITS

    def offered(self, device: Device) -> bool:
        return device.has_tensor_memory and _has_tensor_memory()

    def defaults(self, problem: Problem, device: Device) -> Iterator[BlackwellPrefillConfig]:
        structure = problem.structure
        keys = 128 if max(structure.head_dims) <= 128 else 64
        for q_tiles in (2, 1):
            heads = 1
            if isinstance(problem, ServingProblem) and packs(problem.structure):
                rows = prefill_rows(problem)
                heads = packed_heads(rows, problem.structure.group, LANES * q_tiles)
            for stages in (4, 3, 2):
                config = BlackwellPrefillConfig(keys, stages, q_tiles, 4, heads)
                yield fit_to_mask(config, structure)

    def axes(
        self, problem: Problem, device: Device, effort: Effort
    ) -> Iterator[BlackwellPrefillConfig]:
        return iter(())

    fit_to_mask = staticmethod(fit_to_mask)
    render = staticmethod(render)

    def check_rows(self, rows: int) -> None:
        if rows not in (LANES, 2 * LANES):
            raise ConfigError(
                f"kernel_options['BLOCK_M']={rows} with the Gluon template for Blackwell",
                f"its tiles have {LANES} rows, and a program has 1 or 2",
                f"use {LANES} or {2 * LANES}",
            )

    def forced(
        self, config: BlackwellPrefillConfig, numbers: Mapping[str, Any]
    ) -> BlackwellPrefillConfig:
        """Rows are a number of tiles; its warps and its loads are no choice."""
        names = ("BLOCK_N", "num_stages")
        config = replace(config, **{name: numbers[name] for name in names if name in numbers})
        return replace(config, q_tiles=numbers.get("BLOCK_M", config.BLOCK_M) // LANES)

    def options_of(self, config: BlackwellPrefillConfig) -> dict[str, int | bool | str]:
        rows, keys = config.BLOCK_M, config.BLOCK_N
        stages = config.num_stages
        return {"BACKEND": "GLUON", "BLOCK_M": rows, "BLOCK_N": keys, "num_stages": stages}

    def grid(self, problem: Problem, config: BlackwellPrefillConfig, device: Device) -> Geometry:
        # A program for each work tile: q_tiles tiles of rows of one head, or of several.
        if isinstance(problem, ServingProblem):
            # Each request may end within a tile.
            tiles = problem.rows // config.BLOCK_M + problem.B
            units = tiles * problem.Hkv * config.head_tiles(problem.structure.group)
            return Geometry(units, tiles, units)
        tiles = -(-problem.q_len // config.BLOCK_M)
        units = problem.B * problem.Hq * tiles
        return Geometry(units, tiles, units)


def _has_tensor_memory() -> bool:
    """True if the installed Triton's Gluon has tensor memory with the names of 3.9."""
    try:
        from triton.experimental.gluon.language.nvidia import blackwell
    except ImportError:
        return False
    return hasattr(blackwell.tensor_memory_descriptor, "reinterpret")


PREFILL = _Prefill()
