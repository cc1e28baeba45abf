"""What the sparse attentions share: key heads beside query heads, and numbers in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import InputError


def of_query_heads(x: Tensor, query: Tensor) -> Tensor:
    """What key heads have, repeated for query's; raises InputError where these do not divide."""
    Hq, Hkv = query.shape[1], x.shape[1]
    if not Hkv or Hq % Hkv:
        raise InputError(
            f"{Hq} query heads and {Hkv} key heads",
            "the number of query heads is a multiple of the key heads",
        )
    return x.repeat_interleave(Hq // Hkv, 1)


def wide(x: Tensor) -> Tensor:
    """In float32 at least: 16 bits give equal scores to many."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
