"""flexattn::widened: what torch's node is given for inputs that it has no place for.

An input of eight bits with its factors, or a key narrower than its query, is converted in the
graph to the dtype of the output. Our lowering finds the input itself behind that, and nobody
computes the conversion; wherever torch's node is run by others it is what they attend to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.compiled.op import library
from flexattn.problem.problem import NARROWER

_NAME = "flexattn::widened"
library.define("widened(Tensor x, Tensor? factor, ScalarType dtype) -> Tensor")
# Where the lowering of an op keeps what it was given.
_SOURCE = "_flexattn_source"


def _widened(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if factor is None:
        return x.to(dtype)
    return (x.to(torch.float32) * factor[..., None, None]).to(dtype)


library.impl("widened", _widened, "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, _widened, lib=library)


def widened(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [B, H, S, D] times factor [B, H], where there is one, in a wider dtype."""
    found: Tensor = torch.ops.flexattn.widened(x, factor, dtype)
    return found


def lower_widened(x: Any, factor: Any, dtype: torch.dtype) -> Any:
    """The conversion in Inductor's program, which is left out where nobody asks for it."""
    from torch._inductor.lowering import lowerings, to_dtype

    if factor is None:
        found = to_dtype(x, dtype, copy=True)
    else:
        each = factor
        for _ in range(2):
            each = lowerings[torch.ops.aten.unsqueeze.default](each, -1)
        product = lowerings[torch.ops.aten.mul.Tensor](to_dtype(x, torch.float32), each)
        found = to_dtype(product, dtype, copy=True)
    setattr(found, _SOURCE, (x, factor))
    return found


def widened_sources(given: Any, nodes: Any) -> list[tuple[Any, Any, Any]]:
    """Of query, key and value: the input itself, its node, and its factor.

    given, nodes: as a lowering of torch's node has them.
    """
    op = torch.ops.flexattn.widened.default
    found = [(x, node, None) for x, node in zip(given, nodes, strict=True)]
    for i, (x, node, _) in enumerate(found):
        if getattr(node, "target", None) is op and hasattr(x, _SOURCE):
            source, factor = getattr(x, _SOURCE)
            found[i] = source, node.args[0], factor
    q, k, v = (x.get_dtype() for x, _, _ in found)
    # What was copied or converted between has lost its source: then none is taken.
    fits = k == v and (q == k or k in NARROWER.get(q, ()))
    return found if fits else [(x, node, None) for x, node in zip(given, nodes, strict=True)]
