"""What users write: the types of a score_mod and of a mask_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

# score, b, h, q_idx, kv_idx -> score
ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# b, h, q_idx, kv_idx -> whether the query sees the key
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
