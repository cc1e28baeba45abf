"""Descales: what the numbers of each head of q, k and v stand for, where these have 8 bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
