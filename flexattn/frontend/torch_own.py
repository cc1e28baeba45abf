"""torch's own flex_attention, also where `flexattn.install` has put ours in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

_own = FunctionType(
    flex_attention.__code__, flex_attention.__globals__, "flex_attention",
    flex_attention.__defaults__, flex_attention.__closure__,
)  # fmt: skip
_own.__kwdefaults__ = flex_attention.__kwdefaults__
# Its type is torch's, but for keys of kernel_options that are others'.
torch_own: Any = _own
# Who served calls of torch's function, and nodes of graphs as they were compiled.
served: Counter[str] = Counter()


@lru_cache(maxsize=1)
def torch_flex_attention() -> Callable[..., Any]:
    """torch's flex_attention, compiled, for calls that it differentiates; shapes may change."""
    return torch.compile(torch_own)
