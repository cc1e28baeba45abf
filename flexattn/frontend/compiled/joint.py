"""What the joint graph of a node's backward says: who gets a gradient, and whether it is ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.node import map_aggregate

from flexattn.frontend.compiled.derivative_check import same_gradients
from flexattn.mods import Bound
from flexattn.mods.graph import Captured, GraphMod
from flexattn.util.lru import Lru

# A joint graph takes a score, its position and a gradient, then what the mod captures, and gives
# the gradients of all but its sixth input.
_POSITION, _GRADIENT = 5, 6
# Elements of a captured tensor that stands in for a larger one.
_LARGEST = 2**18
_known: Lru[Any, bool] = Lru(256)


def with_gradients(joint: GraphModule) -> list[int]:
    """Which captures of a joint graph get a gradient, counted among all that it takes."""
    given = joint.graph.output_node().args[0]
    assert isinstance(given, Sequence)
    return [i for i, each in enumerate(given[_POSITION:]) if each is not None]


class Examples:
    """Values in place of what a score_mod captures, which a lowering knows by their kind alone."""

    def __init__(self, captures: Sequence[Captured | None]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.all: list[Any] = [3 if each is None else _example(each, draw) for each in captures]
        self.tensors = [each for each in self.all if isinstance(each, Tensor)]
        self.integers = [each for each in self.all if not isinstance(each, Tensor)]

    def bound(self, mod: GraphMod) -> Bound:
        """A mod with these for its captures."""
        return mod.bound(self.tensors, self.integers)


def joint_agrees(
    joint: GraphModule, bound: Bound, examples: Examples, sizes: Sequence[int]
) -> bool:
    """Whether a joint graph computes what the derivatives of the mod's expression are.

    A graph of the forward has lost what its mod kept from autograd: a detached value, an autograd
    Function with a backward of its own. bound: of the examples. sizes: of B, Hq, L and S.
    """
    wanted = [i for i in with_gradients(joint) if isinstance(examples.all[i], Tensor)]
    given = [examples.all[i] for i in wanted]
    slots = tuple(s for s, x in enumerate(bound.tensors) if any(x is each for each in given))
    shapes = tuple(x.shape for x in examples.tensors)
    key = bound.mod.fingerprint, str(joint.graph), slots, shapes, tuple(sizes)
    found = _known.get(key)
    if found is None:
        places = [next(i for i in wanted if examples.all[i] is bound.tensors[s]) for s in slots]

        def by_graph(env: dict[str, Tensor], weight: Tensor) -> list[Tensor]:
            return _gradients(joint, env, weight, examples.all, places)

        found = same_gradients(bound, slots, sizes, by_graph, _numbers(joint))
        _known.put(key, found)
    return found


def _numbers(joint: GraphModule) -> list[float]:
    """Those of the graph: of its forward some may be gone, as where both sides were the same."""
    found: list[Any] = []
    for node in joint.graph.nodes:
        map_aggregate(node.args, found.append)
    return [x for x in found if type(x) in (int, float)]


def _example(captured: Captured, draw: torch.Generator) -> Tensor:
    shape, dtype = _smaller(captured.shape), getattr(torch, captured.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, device="cpu").to(dtype)
    return torch.randint(2, shape, generator=draw, device="cpu").to(dtype)


def _smaller(shape: Sequence[int]) -> list[int]:
    """A shape that fits into memory beside a compiler: the longest dimensions are halved."""
    found = list(shape)
    while math.prod(found) > _LARGEST:
        longest = found.index(max(found))
        found[longest] //= 2
    return found


def _gradients(
    joint: GraphModule,
    env: dict[str, Tensor],
    weight: Tensor,
    captures: Sequence[Any],
    places: Sequence[int],
) -> list[Tensor]:
    """Of the score, one for each point, and of these captures, summed over the points."""
    points = [env[name] for name in ("score", "b", "h", "q_idx", "kv_idx")]
    mapped: list[bool] = []

    def at_point(*point: Tensor) -> tuple[Tensor, ...]:
        found = _Graph(joint).run(*point, *captures)
        chosen = [found[0], *(found[_POSITION + i] for i in places)]
        chosen = [
            torch.zeros((), dtype=torch.float32, device="cpu") if each is None else each
            for each in chosen
        ]
        mapped[:] = [torch._C._functorch.is_batchedtensor(each) for each in chosen]
        return tuple(chosen)

    score, *rest = torch.vmap(at_point)(*points, weight)
    # A gradient that was scattered is summed over the points already.
    found = [x.sum(0) if each else x[0] for x, each in zip(rest, mapped[1:], strict=True)]
    return [score.float(), *found]


class _Graph(Interpreter):
    """Runs a graph with captures that are smaller than those it was made for."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.index.Tensor:
            tensor, indices = args
            args = tensor, _inside(indices, tensor.shape)
        elif target is torch.ops.flex_lib.zeros_and_scatter.default:
            shape, indices, *rest = args
            shape = _smaller(shape)
            args = shape, _inside(indices, shape), *rest
        return super().call_function(target, args, kwargs)


def _inside(indices: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    return [
        index if index is None else index.clamp(-size, max(size - 1, 0))
        for index, size in zip(indices, shape, strict=False)
    ]
