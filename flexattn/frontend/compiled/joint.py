"""The joint graph of a node's backward: the tensors that get a gradient, and its check by ours.

torch's tracers drop from the graph of a forward what a mod kept from autograd, by detach, by
torch.no_grad, by an autograd Function. An eager call's trace has it (mods/derivative.py); here
the joint graph and autograd's derivative of the expression are asked at some positions: at the
ends, beside the numbers that the mod compares with, and at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.node import map_aggregate

from flexattn.mods import Bound
from flexattn.mods.expr import walk
from flexattn.mods.graph import Captured, GraphMod
from flexattn.mods.outside import evaluated
from flexattn.mods.simplify import plug
from flexattn.util.ambient import without_modes
from flexattn.util.locks import Lru

# A joint graph takes a score, its position and a gradient, then what the mod captures, and gives
# the gradients of all but its sixth input.
_POSITION, _GRADIENT = 5, 6
# Elements of a captured tensor that stands in for a larger one.
_LARGEST = 2**18
_known: Lru[Any, bool] = Lru(256)


def with_gradients(joint: GraphModule) -> list[int]:
    """The captures of a joint graph that get a gradient, counted among all that it takes."""
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
    """True if a joint graph computes the same as the derivatives of the mod's expression.

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
    """The numbers of the graph; some of its forward's may be gone, as where both sides agreed."""
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
    """The gradients of the score, one a point, and of these captures, summed over the points."""
    points = [env[name] for name in ("score", "b", "h", "q_idx", "kv_idx")]
    mapped: list[bool] = []
    wide = [_single(each) if isinstance(each, Tensor) else each for each in captures]

    def at_point(*point: Tensor) -> tuple[Tensor, ...]:
        found = _Graph(joint).run(*point, *wide)
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
    """Runs a graph in float32, with captures that are smaller than those it was made for.

    torch traces a joint graph with scores of the query's dtype and rounds gradients to it. Its
    kernels and ours keep float32.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_aggregate(args, _wider), map_aggregate(kwargs, _wider)
        if target is torch.ops.prims.convert_element_type.default:
            return args[0].to(args[1])  # vmap warns about prims: it has no rule for them
        if target is torch.ops.aten.index.Tensor:
            tensor, indices = args
            args = tensor, _inside(indices, tensor.shape)
        elif target is torch.ops.flex_lib.zeros_and_scatter.default:
            shape, indices, *rest = args
            shape = _smaller(shape)
            args = shape, _inside(indices, shape), *rest
        return super().call_function(target, args, kwargs)


def _wider(argument: Any) -> Any:
    short = argument is torch.float16 or argument is torch.bfloat16
    return torch.float32 if short else argument


def _inside(indices: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    return [
        index if index is None else index.clamp(-size, max(size - 1, 0))
        for index, size in zip(indices, shape, strict=False)
    ]


_POINTS = 256
# Positions that are read in tables which stand for larger ones.
_NEAR = 64
# Beside the largest: what both compute in float32, and what is rounded to 16 bits on the way.
_TOLERANCE, _ROUGH = 1e-3, 0.02
_NAMES = ("b", "h", "q_idx", "kv_idx")


@without_modes()
def same_gradients(
    bound: Bound,
    slots: tuple[int, ...],
    sizes: Sequence[int],
    others: Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]],
    numbers: Sequence[float],
) -> bool:
    """True if `others` gives a score_mod's derivatives, at positions of sizes (B, Hq, L, S).

    others(env, weight): the gradients of the sum of weight times the mod's values, [points], with
    respect to the score and to the tensors of the slots. env: the score, b, h, q_idx and kv_idx.
    numbers: that they compute with.
    """
    device = bound.tensors[0].device if bound.tensors else torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    env = {
        name: x.to(device) for name, x in _points(sizes, (*numbers, *bound.scalars), draw).items()
    }
    weight = torch.randn(_POINTS, generator=draw, dtype=torch.float32).to(device)
    leaves = {slot: _single(bound.tensors[slot]).requires_grad_() for slot in slots}
    tensors = [leaves.get(slot, x.detach()) for slot, x in enumerate(bound.tensors)]
    expr = plug(bound.mod.expr, dict(enumerate(bound.scalars)))
    score = env["score"].clone().requires_grad_()
    try:
        with torch.enable_grad():
            found = evaluated([expr], tensors, env | {"score": score})[expr]
            # What rests on a read outside of a tensor says nothing of either.
            weight = torch.where(found.unsure, 0.0, weight)
            # A score that is not read has a gradient of 0.
            total = (weight * found.value + 0.0 * score).sum()
            ours = torch.autograd.grad(
                total, [score, *leaves.values()], allow_unused=True, materialize_grads=True
            )
        theirs = others(env, weight)
    except (NotImplementedError, RuntimeError):  # what autograd has no rule for
        return False
    rough = any(node.dtype in ("float16", "bfloat16") for node in walk(bound.mod.expr))
    tolerance = _ROUGH if rough else _TOLERANCE
    pairs = zip(ours, theirs, strict=True)
    return all(_agree(one.float(), other.to(device).float(), tolerance) for one, other in pairs)


def _single(captured: Tensor) -> Tensor:
    """A captured tensor without a graph, in float32 where it has 16 bits: gradients are sums."""
    short = captured.dtype in (torch.float16, torch.bfloat16)
    return captured.detach().to(torch.float32 if short else captured.dtype, copy=True)


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """True if two gradients are the same; what is no number in either says nothing."""
    if not one.numel():
        return True
    finite = one.isfinite() & other.isfinite()
    one, other = torch.where(finite, one, 0.0), torch.where(finite, other, 0.0)
    largest = torch.maximum(one.abs().max(), other.abs().max())
    return bool(((one - other).abs() <= tolerance * largest).all())


def _points(
    sizes: Sequence[int], numbers: Sequence[float], draw: torch.Generator
) -> dict[str, Tensor]:
    """Scores and positions: a half at random, near enough for small tables, and a half at places.

    Places are the ends, each of the numbers and its neighbours, and keys as far from their row.
    """
    known = torch.tensor(
        sorted({float(x) for x in numbers if abs(x) < 2**31}) or [0.0], dtype=torch.float32
    )
    placed = torch.arange(_POINTS) % 2 == 1

    def one_of(values: Tensor) -> Tensor:
        return values[torch.randint(len(values), (_POINTS,), generator=draw)]

    env = {}
    for name, size in zip(_NAMES, sizes, strict=True):
        last = max(size - 1, 0)
        ends = torch.tensor([0, 1, last])
        places = torch.cat([ends, ends, *(known.long() + i for i in (-1, 0, 1))])
        near = torch.randint(max(min(size, _NEAR), 1), (_POINTS,), generator=draw)
        env[name] = torch.where(placed, one_of(places), near).clamp(0, last)
    far = torch.arange(_POINTS) % 8 == 3
    apart = env["q_idx"] - one_of(torch.cat([known, -known])).long()
    env["kv_idx"] = torch.where(far, apart, env["kv_idx"]).clamp(0, max(sizes[3] - 1, 0))
    noise = torch.randn(_POINTS, generator=draw, dtype=torch.float32)
    # Larger scores would make what is compared as large, and hide the others.
    beside = one_of(torch.cat([known, -known]).clamp(-100, 100)) + 0.1 * noise
    env["score"] = torch.where(placed, beside, 2 * noise)
    return env
