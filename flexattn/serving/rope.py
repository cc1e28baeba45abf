"""Rope: how keys are rotated by their positions before they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.errors import InputError
from flexattn.kernels.cache_append.form import RopeForm
from flexattn.problem import DTYPES


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` columns of a key; the others stay.

    interleaved: pairs are neighbours (GPT-J); else column i and i + dim / 2 (NeoX, Llama). base:
    the angle of pair i is position x base^(-2 i / dim), in float32 as models compute it. None:
    runs are given tables cos and sin [positions, dim / 2] of dtype `table`, for any angles.

    Method: Su et al., RoFormer, arXiv 2104.09864.
    """

    dim: int
    interleaved: bool = False
    base: float | None = None
    table: torch.dtype = torch.float32

    def form(self, head_dim: int) -> RopeForm:
        """What of it decides a kernel; raises InputError for what no head of this width has."""
        if self.dim < 2 or self.dim % 2 or self.dim > head_dim:
            raise InputError(
                f"rope of {self.dim} columns, heads of {head_dim}",
                "an even number of columns is rotated, at most all of a head",
            )
        if self.base is not None and not self.base > 0:
            raise InputError(f"rope of base {self.base}", "a base is above 0")
        if self.table not in DTYPES:
            raise InputError(
                f"tables of {self.table}", f"cos and sin are of {', '.join(map(str, DTYPES))}"
            )
        return RopeForm(
            self.dim, bool(self.interleaved), "" if self.base is not None else DTYPES[self.table]
        )

    def inv_freq(self) -> Tensor:
        """Angles of position 1, float32 [dim / 2], as transformers computes them."""
        assert self.base is not None
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return 1.0 / (self.base**steps)
