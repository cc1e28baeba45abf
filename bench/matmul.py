"""torch.matmul of as many operations as a row: what a card's matrix units and power allow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.inputs import Inputs
from bench.refusal import Refusal

__all__ = ["MATMUL", "matmul"]

MATMUL = "matmul"
# Long sides keep cuBLAS at its best rate; random numbers draw the power that attention's draw.
SIDE = 8192


def matmul(x: Inputs) -> Callable[[], Tensor] | Refusal:
    """A product [m, SIDE] x [SIDE, SIDE] with m chosen for the row's operations, of its dtype."""
    if x.row.fp8:
        return Refusal("its products are of 16 bits or 32")
    rows = max(128, round(x.row.flops / (2 * SIDE * SIDE) / 128) * 128)
    draw = torch.Generator(x.q.device).manual_seed(1)
    made = {"generator": draw, "device": x.q.device, "dtype": x.q.dtype}
    a, b = torch.randn(rows, SIDE, **made), torch.randn(SIDE, SIDE, **made)
    return lambda: torch.matmul(a, b)
