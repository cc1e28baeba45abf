"""Dropout: how many of a call's weights are dropped, and the seed that says which."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Each weight has 15 random bits: dropout_p is rounded to a multiple of 2^-15.
RANDOM_NUMBERS = 2**15


class Dropout(NamedTuple):
    """Which weights are dropped, by a random number of 15 bits for each.

    below: of the 2^15 numbers, how many drop a weight, from 1 to all of them: those under it.
    seed: int64 [1] on the call's device, None where nothing is drawn yet. The mask is a function
    of it and of (b, h, q_idx, kv_idx) alone: see flexattn/reference/dropout.py.
    """

    below: int
    seed: Tensor | None = None

    @classmethod
    def of(cls, p: float) -> Dropout | None:
        """What drops weights with probability p, from 0 to 1; None where that rounds to 0."""
        below = round(p * RANDOM_NUMBERS)
        return cls(below) if below else None

    @property
    def scale(self) -> float:
        """What weights that are kept are multiplied by, so that their mean stays; 1 of none."""
        kept = RANDOM_NUMBERS - self.below
        return RANDOM_NUMBERS / kept if kept else 1.0

    def drawn(self, device: torch.device) -> Dropout:
        """With a seed from torch's default generator of a device; nothing waits for the device."""
        return self._replace(seed=torch.randint(2**63 - 1, (1,), device=device))

    def keeps(self, numbers: Tensor) -> Tensor:
        """Which of the numbers keep their weights."""
        return numbers >= self.below

    def arguments(self) -> dict[str, Any]:
        """What kernels take, by their names for it.

        last_dropped: the greatest number that drops a weight. It has 15 bits, as numbers have, so
        that kernels compare bit by bit.
        """
        last = self.below - 1
        return {"DROPOUT_SEED": self.seed, "last_dropped": last, "keep_scale": self.scale}
