"""outside(): call a function outside of what torch.compile compiles.

Its decorator loads torch._dynamo, which takes a second: a module of its own is imported by code
that is being compiled alone, where that is loaded already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


# torch.export and fullgraph=True, which take no break, print the reason.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="torch's node of flex_attention has no place for all of this call: "
    "flexattn.explain of the same arguments says for what"
)
def outside(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call fn with the arguments, as if nothing were compiled; breaks a graph being traced."""
    return fn(*args, **kwargs)
