"""The graphs of a node's backward: which tensors get a gradient, and if autograd saw all of a mod.

torch's tracers drop from the graph of a forward what a mod kept from autograd, by detach, by
torch.no_grad, by an autograd Function. Dynamo's graph of the mod has it still. Before torch makes
the graphs of both directions of it, it gets a mark: an op that gives back the score, and says
whether each of its operations is one that autograd follows. What nobody marked is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from flexattn.frontend.compiled.op import define_op, library
from flexattn.mods import Bound
from flexattn.mods.graph import Captured, GraphMod

# A joint graph takes a score, its position and a gradient, then what the mod captures, and gives
# the gradients of all but its sixth input.
_POSITION = 5
# Autograd differentiates what functions of these modules compute, except if a name has one of
# the words in _STOPS.
_FOLLOWED = frozenset(
    (
        "_operator math torch torch._tensor torch.functional torch.nn.functional torch._C._nn "
        "torch._C._special"
    ).split()
)
_STOPS = ("detach", "requires_grad", "hook", "data", "grad")


def with_gradients(joint: GraphModule) -> list[int]:
    """The captures of a joint graph that get a gradient, counted among all that it takes."""
    given = joint.graph.output_node().args[0]
    assert isinstance(given, Sequence)
    return [i for i, each in enumerate(given[_POSITION:]) if each is not None]


class Examples:
    """Values in place of what a score_mod captures, which a lowering knows by their kind alone."""

    def __init__(self, captures: Sequence[Captured | None]) -> None:
        self.all: list[Any] = [3 if each is None else _example(each) for each in captures]
        self.tensors = [each for each in self.all if isinstance(each, Tensor)]
        self.integers = [each for each in self.all if not isinstance(each, Tensor)]

    def bound(self, mod: GraphMod) -> Bound:
        """A mod with these for its captures."""
        return mod.bound(self.tensors, self.integers)


def _example(captured: Captured) -> Tensor:
    return torch.ones(
        [1] * len(captured.shape), dtype=getattr(torch, captured.dtype), device="cpu"
    )


def marked(score_mod: Callable[..., Any]) -> Callable[..., Any]:
    """A score_mod, as Dynamo traced it, whose graphs say if autograd follows each operation."""
    if not isinstance(score_mod, GraphModule) or _marks(score_mod):
        return score_mod
    whole = all(map(_is_followed, score_mod.graph.nodes))
    return lambda *given: TRACED_OP(score_mod(*given), whole)


def is_followed(graph: GraphModule) -> bool:
    """True if a score_mod's graph is marked as one of which autograd follows each operation."""
    found = _marks(graph)
    return bool(found) and all(node.args[1] for node in found)


def _marks(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is TRACED_OP]


def _is_followed(node: Node) -> bool:
    """True if the gradient of an operation is that of what it computes."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    known = node.op == "call_method" or getattr(node.target, "__module__", "") in _FOLLOWED
    return known and not any(each in name for each in _STOPS)


def _given_back(score: Tensor, whole: bool) -> Tensor:
    return score.clone()


TRACED_OP = define_op(
    "traced(Tensor score, bool whole) -> Tensor", _given_back, _given_back, torch.Tag.pointwise
)
torch.library.register_autograd("flexattn::traced", lambda ctx, grad: (grad, None), lib=library)
torch.library.register_vmap(
    "flexattn::traced",
    lambda info, dims, score, whole: (TRACED_OP(score, whole), dims[0]),
    lib=library,
)
