"""The document mask of packed sequences: which keys each row sees, made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from flexattn.block_mask.intervals import interval_mask
from flexattn.catalogue.masks import causal as causal_mask, document, document_ids
from flexattn.mods.expr import MaskMod, ScoreMod


class Packing(NamedTuple):
    """Which keys each row sees: cu_seqlens, lengths, a window and a mask_mod of positions."""

    cu_q: Tensor
    cu_k: Tensor
    rows: int
    keys: int
    left: int
    right: int
    mask_mod: MaskMod | None

    @property
    def alike(self) -> bool:
        """True if each sequence has the same queries and keys: rows and keys have one table."""
        return self.cu_q is self.cu_k and self.rows == self.keys


class Positions(NamedTuple):
    """The positions of rows in their sequences, for mods.

    sequence int32 [rows]: the number of each row's sequence, of a row behind the last one that of
    the last. q_start, k_start int32 [rows]: its first query and its first key.
    """

    sequence: Tensor
    q_start: Tensor
    k_start: Tensor

    def score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """A score_mod of positions in a sequence as one of positions in the pack."""
        sequence, q_start, k_start = self

        def by_position(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            q_at, kv_at = q_idx - q_start[q_idx], kv_idx - k_start[q_idx]
            return score_mod(score, sequence[q_idx], h, q_at, kv_at)

        return by_position

    def mask_mod(self, mask_mod: MaskMod) -> MaskMod:
        """The same of a mask_mod."""
        sequence, q_start, k_start = self

        def by_position(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q_at, kv_at = q_idx - q_start[q_idx], kv_idx - k_start[q_idx]
            return mask_mod(sequence[q_idx], h, q_at, kv_at)

        return by_position


def document_mask(packing: Packing) -> tuple[BlockMask, Positions]:
    """The mask of a call whose rows and keys are above 0, and where its rows stand."""
    cu_q = packing.cu_q.to(torch.int32)
    cu_k = cu_q if packing.alike else packing.cu_k.to(torch.int32)
    of = document_ids(cu_q, packing.rows)
    q_start = cu_q[of]
    k_start = q_start if packing.alike else cu_k[of]
    k_end = _ends(cu_k, packing.keys)[of]
    positions = Positions(of.clamp(max=max(cu_q.shape[0] - 2, 0)), q_start, k_start)
    # The key at which each row stands, the last one at its sequence's last.
    at = torch.arange(packing.rows, dtype=torch.int32, device=of.device)
    if not packing.alike:
        at = at - _ends(cu_q, packing.rows)[of] + k_end
    first, end = k_start, k_end
    if packing.left >= 0:
        first = torch.maximum(first, at - packing.left)
    if packing.right >= 0:
        end = torch.minimum(end, at + (packing.right + 1))
    end = torch.maximum(end, k_start)
    # cu_seqlens that do not fit give wrong numbers, and no read outside of the keys.
    first, end = first.clamp(0, packing.keys), end.clamp(0, packing.keys)
    terms: list[MaskMod] = [_between(first, end)]
    if packing.alike:  # positions cancel
        terms = [document(of), *sided(packing.left, packing.right)]
    whole = packing.mask_mod is None
    if packing.mask_mod is not None:
        terms.append(positions.mask_mod(packing.mask_mod))
    mask_mod = terms[0] if len(terms) == 1 else and_masks(*terms)
    graded = torch.is_grad_enabled()
    return interval_mask(first, end, packing.keys, mask_mod, whole, graded), positions


def _ends(cu: Tensor, length: int) -> Tensor:
    """The end of each sequence, and of what lies behind the last one."""
    return torch.nn.functional.pad(cu[1:], (0, 1), value=length)


def sided(left: int, right: int) -> tuple[MaskMod, ...]:
    """The terms of a mask that are a window.

    `int` makes its sides constants of a kernel: one that reads them as arguments knows no band.
    """
    terms: list[MaskMod] = []
    if right == 0:
        terms.append(causal_mask)
    elif right > 0:
        terms.append(lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= int(right))
    if left >= 0:
        terms.append(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= int(left))
    return tuple(terms)


def _between(first: Tensor, end: Tensor) -> MaskMod:
    def between(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (first[q_idx] <= kv_idx) & (kv_idx < end[q_idx])

    return between
