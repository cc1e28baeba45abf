"""Configs of the Triton templates, for every GPU: prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from flexattn.kernels.base.config import Language
from flexattn.kernels.base.features import loads_early
from flexattn.kernels.base.knobs import knob

TritonOrder = Literal["last", "first", "group", "heads"]
ORDERS: tuple[TritonOrder, ...] = ("last", "first", "group", "heads")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A tile of BLOCK_M query rows loops over the keys, BLOCK_N at a time.

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
    order: TritonOrder = "last"
    early_loads: bool = knob(True, False, word="late", moves=loads_early)

    heads: ClassVar[int] = 1
    language: ClassVar[Language] = "triton"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """BLOCK_M packed rows (query heads of a group x query positions) loop over a split of keys.

    num_splits: pieces of the keys, each for one CTA; 0 lets the sizes decide at launch.
    early_loads: as in prefill.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    num_splits: int = 0
    early_loads: bool = knob(True, False, word="late", moves=loads_early)

    heads: ClassVar[int] = 1
    language: ClassVar[Language] = "triton"


TritonConfigT = TypeVar("TritonConfigT", PrefillConfig, DecodeConfig)
