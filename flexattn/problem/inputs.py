"""The optional inputs of a call beside q, k and v: sinks, factors of each head, and dropout."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention without sinks [Hq] as they are with them.

    out [B, Hq, L, Ev] keeps its dtype; lse [B, Hq, L] is in natural log. A row without a key,
    whose lse is -inf, keeps its zeros and gets its sink as lse. Exact except for rounding, and
    differentiable in all three: exp(lse) / (exp(lse) + exp(sink)) is sigmoid(lse - sink).
    """
    sink = sinks.to(lse.dtype)[:, None]
    empty = lse == -math.inf
    # A finite number where there is no key: the gradient of what `where` drops would be NaN.
    some = torch.where(empty, 0.0, lse)
    keep = torch.sigmoid(some - sink)
    total = torch.where(empty, sink, torch.logaddexp(some, sink))
    return (out * keep[..., None]).to(out.dtype), total


class Descales(NamedTuple):
    """Factors fp32, q [B, Hq], k and v [B or 1, Hkv]; None stands for ones."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def strides(self) -> dict[str, int]:
        """Between batches and heads, 0 where there is one of them, by kernels' names for them."""
        found = {}
        for name, x in zip(self._fields, self, strict=True):
            sizes = (1, 1) if x is None else x.shape
            steps = (0, 0) if x is None else x.stride()
            for axis, n, step in zip("bh", sizes, steps, strict=True):
                found[f"{name}_descale_{axis}"] = 0 if n == 1 else step
        return found


NO_DESCALES = Descales()


def descaled(x: Tensor, descale: Tensor | None) -> Tensor:
    """x [B, H, S, D] times its head's factor."""
    return x if descale is None else x * descale.to(x.dtype)[..., None, None]


# Each weight has 15 random bits: dropout_p is rounded to a multiple of 2^-15.
RANDOM_NUMBERS = 2**15


class Dropout(NamedTuple):
    """The rule that drops weights, by a random number of 15 bits for each.

    below: of the 2^15 numbers, how many drop a weight, from 1 to all of them: those under it.
    seed: int64 [1] on the call's device, None where nothing is drawn yet. The mask is a function
    of it and of (b, h, q_idx, kv_idx) alone: see flexattn/reference/dropout.py.
    """

    below: int
    seed: Tensor | None = None

    @classmethod
    def of(cls, p: float) -> Dropout | None:
        """The Dropout of probability p, from 0 to 1; None where that rounds to 0."""
        below = round(p * RANDOM_NUMBERS)
        return cls(below) if below else None

    @property
    def scale(self) -> float:
        """The factor of weights that are kept, so that their mean stays; 1 where none are kept."""
        kept = RANDOM_NUMBERS - self.below
        return RANDOM_NUMBERS / kept if kept else 1.0

    def drawn(self, device: torch.device) -> Dropout:
        """With a seed from torch's default generator of a device; nothing waits for the device."""
        return self._replace(seed=torch.randint(2**63 - 1, (1,), device=device))

    def keeps(self, numbers: Tensor) -> Tensor:
        """True for each of the numbers that keeps its weight."""
        return numbers >= self.below

    def arguments(self) -> dict[str, Any]:
        """The arguments of kernels, by their names for them.

        last_dropped: the greatest number that drops a weight. It has 15 bits, as numbers have, so
        that kernels compare bit by bit.
        """
        last = self.below - 1
        return {"DROPOUT_SEED": self.seed, "last_dropped": last, "keep_scale": self.scale}
