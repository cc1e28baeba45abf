"""torch's compiled flex_attention, for calls that are differentiated by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)
def torch_flex_attention() -> Callable[..., Any]:
    """torch's flex_attention, compiled; shapes may change without a recompile."""
    from flexattn.frontend.torch_own import torch_own

    return torch.compile(torch_own)
