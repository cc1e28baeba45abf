"""Config: one variant of one template, as frozen numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from flexattn.kernels.hopper.config import GluonPrefillConfig

__all__ = [
    "ORDERS",
    "Config",
    "DecodeConfig",
    "GluonPrefillConfig",
    "Language",
    "Order",
    "PrefillConfig",
    "describe",
    "language_of",
    "padded",
    "pieces",
]

Order = Literal["last", "first", "group", "heads"]
ORDERS: tuple[Order, ...] = ("last", "first", "group", "heads")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A tile of BLOCK_M query rows walks the keys BLOCK_N at a time.

    use_tma: Q, K and V are read through tensor descriptors, by the bulk copy engine.
    order: which tiles start first. "last" and "first": a head's last or first rows, head after
    head; "group": the heads that share keys side by side; "heads": all heads side by side. The
    last two start with the last rows. early_loads: what a score_mod loads by key alone is asked
    for before the scores are computed.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    order: Order = "last"
    early_loads: bool = True


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """BLOCK_M packed rows (query heads of a group x query positions) walk their split of the keys.

    num_splits: pieces of the keys, each for one CTA; 0 lets the sizes decide at launch.
    early_loads: as in prefill.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    num_splits: int = 0
    early_loads: bool = True


Config = PrefillConfig | GluonPrefillConfig | DecodeConfig
Language = Literal["triton", "gluon"]


def language_of(config: Config) -> Language:
    """What the template of a config is written in."""
    return "gluon" if isinstance(config, GluonPrefillConfig) else "triton"


def describe(config: Config) -> str:
    """Names and numbers in one line, for headers and reports; without what holds its default."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return " ".join(f"{field.name}={value}" for field, value in values if value != field.default)


def pieces(head_dim: int) -> tuple[tuple[int, int, int], ...]:
    """Cut a head dimension into at most two power-of-two tiles: (offset, tile, elements used).

    192 is 128 + 64 and 576 is 512 + 64 exactly; 112 is one tile of 128, padded.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    rest = head_dim - half
    if whole == 16 or head_dim == whole:
        return ((0, whole, head_dim),)
    tail = max(16, 1 << (rest - 1).bit_length())
    if tail >= half:
        return ((0, whole, head_dim),)
    return ((0, half, half), (half, tail, rest))


def padded(head_dim: int) -> int:
    """Elements of a head dimension as the tiles hold them."""
    return sum(tile for _, tile, _ in pieces(head_dim))
