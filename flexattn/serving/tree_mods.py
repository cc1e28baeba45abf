"""Mods of a TreePlan's launches: keys from a position on, and rows of other queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_Mod = Callable[..., Any]


def from_first(first: Tensor, mask_mod: _Mod | None) -> _Mod:
    """A mask of the keys from first[b] on, which bounds the loop over a request's keys."""

    def later(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return kv_idx >= first[b]

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        assert mask_mod is not None
        return (kv_idx >= first[b]) & mask_mod(b, h, q_idx, kv_idx)

    return later if mask_mod is None else both


@dataclass(frozen=True, slots=True)
class Places:
    """Which query a row of the launch over shared keys is, where `b` is a shared read.

    gather, before: of TreeTables. lens int32 [batch]: keys of each request. q_len: query positions
    of each, of which the last one stands at its last key.
    """

    gather: Tensor
    before: Tensor
    lens: Tensor
    q_len: int

    def __call__(self, b: Any, q_idx: Any) -> tuple[Any, Any]:
        """The request of a row, and the position of its query there."""
        query = self.gather[self.before[b] + q_idx]
        request = query // self.q_len
        return request, (self.lens[request] - self.q_len).clamp(min=0) + query % self.q_len


def placed_score(places: Places, score_mod: _Mod) -> _Mod:
    """A score_mod of requests and positions, for that launch."""

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        request, position = places(b, q_idx)
        return score_mod(score, request, h, position, kv_idx)

    return score


def placed_mask(places: Places, mask_mod: _Mod) -> _Mod:
    """A mask_mod of requests and positions, for that launch."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        request, position = places(b, q_idx)
        return mask_mod(request, h, position, kv_idx)

    return mask
