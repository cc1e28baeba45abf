"""Configs of the Triton templates, for every GPU: prefill and decode, their tiles and grids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from flexattn.device import Device
from flexattn.kernels.base.amd import AmdHints
from flexattn.kernels.base.config import Geometry, Language, tile_for, tiles_per_q
from flexattn.problem import Problem, Structure

TritonOrder = Literal["last", "first", "group", "heads"]
ORDERS: tuple[TritonOrder, ...] = ("last", "first", "group", "heads")


@dataclass(frozen=True, slots=True)
class _Tiles:
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    # Fields of earlier versions, with the value that every kernel has now.
    retired: ClassVar[dict[str, object]] = {"early_loads": True}

    heads: ClassVar[int] = 1
    language: ClassVar[Language] = "triton"


@dataclass(frozen=True, slots=True)
class PrefillConfig(_Tiles):
    """A tile of BLOCK_M query rows loops over the keys, BLOCK_N at a time.

    use_tma: Q, K and V are read through tensor descriptors, by the bulk copy engine.
    order: which tiles start first. "last" and "first": a head's last or first rows, head after
    head; "group": the heads that share keys side by side; "heads": all heads side by side. The
    last two start with the last rows.
    """

    use_tma: bool = False
    order: TritonOrder = "last"


@dataclass(frozen=True, slots=True)
class DecodeConfig(_Tiles):
    """BLOCK_M packed rows (query heads of a group x query positions) loop over a split of keys.

    num_splits: pieces of the keys, each for one CTA; 0 lets the sizes decide at launch.
    """

    num_splits: int = 0


TritonConfigT = TypeVar("TritonConfigT", PrefillConfig, DecodeConfig)


@dataclass(frozen=True)
class AmdPrefillConfig(AmdHints, PrefillConfig):
    """A PrefillConfig with hints for AMD's compiler."""


@dataclass(frozen=True)
class AmdDecodeConfig(AmdHints, DecodeConfig):
    """A DecodeConfig with hints for AMD's compiler."""


def fit_to_mask(config: TritonConfigT, structure: Structure) -> TritonConfigT:
    """The config with its tiles cut to the mask's blocks."""
    sparsity = structure.sparsity
    if sparsity is None:
        return config
    return replace(
        config,
        BLOCK_M=tile_for(config.BLOCK_M, sparsity.q_block * structure.packed_heads),
        BLOCK_N=tile_for(config.BLOCK_N, sparsity.kv_block),
    )


def prefill_grid(problem: Problem, config: PrefillConfig) -> Geometry:
    """A program for each row tile of each head."""
    tiles, units = _units(problem, config)
    return Geometry(units, tiles, units)


def decode_grid(problem: Problem, config: DecodeConfig, device: Device) -> Geometry:
    """A program for each split of a row tile's keys.

    Splits fill the SMs once, and none is without a tile of keys.
    """
    tiles, units = _units(problem, config)
    key_tiles = max(1, -(-problem.kv_len // config.BLOCK_N))
    # No unit where there is no row: nothing is launched then.
    splits = config.num_splits or max(1, device.num_sms // max(1, units))
    splits = min(splits, key_tiles)
    return Geometry(units * splits, tiles, units, splits)


def _units(problem: Problem, config: PrefillConfig | DecodeConfig) -> tuple[int, int]:
    """Row tiles of the heads that share theirs, and of all heads."""
    tiles = _row_tiles(problem, config)
    return tiles, problem.B * (problem.Hq // problem.structure.packed_heads) * tiles


def _row_tiles(problem: Problem, config: PrefillConfig | DecodeConfig) -> int:
    structure, sparsity = problem.structure, problem.structure.sparsity
    tiles = -(-problem.q_len * structure.packed_heads // config.BLOCK_M)
    if sparsity is None:
        return tiles
    if structure.kind == "decode" or sparsity.q_block % config.BLOCK_M:
        blocks = -(-problem.q_len // sparsity.q_block)
        per_block = tiles_per_q(structure, config)
        return min(per_block, tiles) if blocks == 1 else blocks * per_block
    return tiles
