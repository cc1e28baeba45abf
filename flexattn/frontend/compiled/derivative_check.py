"""Whether a compiled graph's gradients are those of the expression that its forward became.

torch's tracers drop from the graph of a forward what a mod kept from autograd, by detach, by
torch.no_grad, by an autograd Function. An eager call's trace has it (mods/stops.py); here both are
asked at some positions: at the ends, beside the numbers that the mod compares with, and at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexattn.mods import Bound
from flexattn.mods.derivative import derivatives
from flexattn.mods.expr import Expr, walk
from flexattn.mods.outside import buffer_of, evaluated
from flexattn.mods.simplify import plug
from flexattn.util.ambient import without_modes

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
    """Whether a score_mod's derivatives are others, at positions of sizes (B, Hq, L, S).

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
    found = derivatives(bound.mod, slots)
    scalars = dict(enumerate(bound.scalars))
    roots = [plug(each, scalars) for each in (bound.mod.expr, *found.roots)]
    tensors = [tensor.detach() for tensor in bound.tensors]
    values = evaluated(roots, tensors, env)
    # What rests on a read outside of a tensor says nothing of either.
    sure = ~torch.stack([values[root].unsure.expand(_POINTS) for root in roots]).any(0)
    weight = torch.where(sure, weight, 0.0)
    ours = _ours(bound, found.score, [(x.load, x.factor) for x in found.loads], slots, env, weight)
    try:
        theirs = others(env, weight)
    except (NotImplementedError, RuntimeError):  # what autograd has no rule for
        return False
    rough = any(node.dtype in ("float16", "bfloat16") for node in walk(bound.mod.expr))
    tolerance = _ROUGH if rough else _TOLERANCE
    pairs = zip(ours, theirs, strict=True)
    return all(one.agrees(other.to(device), tolerance) for one, other in pairs)


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


@dataclass(slots=True)
class _Sum:
    """A gradient at the places where something was added: dense, it may be as large as the scores.

    places: of elements, in a flat tensor. rounding: of autograd, which adds up in the dtype.
    """

    places: list[Tensor]
    grads: list[Tensor]
    rounding: float

    def add(self, places: Tensor, grads: Tensor) -> None:
        """Add gradients at flat places."""
        self.places.append(places)
        self.grads.append(grads)

    def agrees(self, other: Tensor, tolerance: float) -> bool:
        """Whether a dense gradient is the same there; what is no number in one says nothing."""
        if not self.places or not other.numel():
            return not bool((other != 0).any())
        flat, inverse = torch.unique(torch.cat(self.places), return_inverse=True)
        grads = torch.cat(self.grads)
        one, size = (
            each.new_zeros(flat.shape).index_add_(0, inverse, each)
            for each in (grads, grads.abs())
        )
        theirs = other.flatten()[flat].float()
        finite = one.isfinite() & theirs.isfinite()
        one, theirs = torch.where(finite, one, 0.0), torch.where(finite, theirs, 0.0)
        largest = torch.maximum(one.abs().max(), theirs.abs().max())
        allowed = tolerance * largest + self.rounding * size
        return bool(((one - theirs).abs() <= allowed).all())


def _ours(
    bound: Bound,
    score: Expr | None,
    loads: Sequence[tuple[Expr, Expr]],
    slots: tuple[int, ...],
    env: dict[str, Tensor],
    weight: Tensor,
) -> list[_Sum]:
    scalars = dict(enumerate(bound.scalars))
    tensors = [tensor.detach() for tensor in bound.tensors]

    def value(expr: Expr) -> Tensor:
        expr = plug(expr, scalars)
        return evaluated([expr], tensors, env)[expr].value.expand(_POINTS)

    def given(expr: Expr) -> Tensor:
        return torch.where(weight == 0, 0.0, weight * value(expr).float())

    found = {slot: _Sum([], [], 4 * torch.finfo(tensors[slot].dtype).eps) for slot in slots}
    for load, factor in loads:
        flat = torch.zeros(_POINTS, dtype=torch.int64, device=weight.device)
        for index, size in zip(load.args, buffer_of(load, tensors).shape, strict=True):
            place = value(index).long().clamp(-size, max(size - 1, 0))
            flat = flat * size + torch.where(place < 0, place + size, place)
        found[int(load.value or 0)].add(flat, given(factor))
    first = torch.zeros_like(weight) if score is None else given(score)
    here = torch.arange(_POINTS, device=weight.device)
    return [_Sum([here], [first], 0.0), *found.values()]
