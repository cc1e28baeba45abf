"""Whether autograd differentiates a score_mod as its traced expression is differentiated.

A trace says what a mod computes. It does not say what the mod keeps from autograd: by detach, by
torch.no_grad, by an autograd Function with a backward of its own. So the first call with gradients
asks both at some positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.mods import Bound, bind
from flexattn.mods.derivative import derivatives
from flexattn.mods.expr import Expr
from flexattn.mods.outside import buffer_of, evaluated
from flexattn.mods.simplify import plug
from flexattn.reference import at_points
from flexattn.util.lru import Lru

__all__ = ["agrees"]

_POINTS = 256
# Beside the largest: a mod's own gradient may be that of what it approximates.
_TOLERANCE = 0.02
_known: Lru[Any, bool] = Lru(256)


def agrees(
    fn: Callable[..., Any] | Bound, bound: Bound, slots: tuple[int, ...], sizes: Sequence[int]
) -> bool:
    """Whether both give the same at random positions of sizes (B, Hq, q_len, kv_len).

    slots: of the captured tensors that require grad. Asked once for a function's code and its
    expression; raises what `derivatives` and the mod raise.
    """
    if isinstance(fn, Bound):
        return True  # what is bound already has no other gradient
    key = (getattr(fn, "__code__", type(fn)), bound.mod.fingerprint, slots)
    found = _known.get(key)
    if found is None:
        found = _compare(fn, bound, slots, sizes)
        _known.put(key, found)
    return found


def _compare(
    fn: Callable[..., Any], bound: Bound, slots: tuple[int, ...], sizes: Sequence[int]
) -> bool:
    device = bound.tensors[0].device if bound.tensors else torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    names = ("b", "h", "q_idx", "kv_idx")
    env = {
        name: torch.randint(max(size, 1), (_POINTS,), generator=draw).to(device)
        for name, size in zip(names, sizes, strict=True)
    }
    env["score"] = (2 * torch.randn(_POINTS, generator=draw)).to(device)
    weight = torch.randn(_POINTS, generator=draw).to(device)
    found = derivatives(bound.mod, slots)
    scalars = dict(enumerate(bound.scalars))
    roots = [plug(each, scalars) for each in (bound.mod.expr, *found.roots)]
    tensors = [tensor.detach() for tensor in bound.tensors]
    values = evaluated(roots, tensors, env)
    # What rests on a read outside of a tensor says nothing of either.
    sure = ~torch.stack([values[root].unsure.expand(_POINTS) for root in roots]).any(0)
    weight = torch.where(sure, weight, 0.0)
    ours = _ours(bound, found.score, [(x.load, x.factor) for x in found.loads], slots, env, weight)
    # As the mod has them: numbers on the CPU were moved for a kernel.
    own = bind(fn, "score")
    assert own is not None
    try:
        theirs = _theirs(fn, [own.tensors[slot] for slot in slots], env, weight)
    except (NotImplementedError, RuntimeError):  # what autograd has no rule for
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(one.agrees(other.to(device)) for one, other in pairs)


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

    def agrees(self, other: Tensor) -> bool:
        """Whether a dense gradient is the same there; what is no number in one says nothing."""
        if not self.places or not other.numel():
            return not bool((other != 0).any())
        flat, inverse = torch.unique(torch.cat(self.places), return_inverse=True)
        grads = torch.cat(self.grads)
        one, size = (
            torch.zeros(flat.shape, device=flat.device).index_add_(0, inverse, each)
            for each in (grads, grads.abs())
        )
        theirs = other.flatten()[flat].float()
        finite = one.isfinite() & theirs.isfinite()
        one, theirs = torch.where(finite, one, 0.0), torch.where(finite, theirs, 0.0)
        largest = torch.maximum(one.abs().max(), theirs.abs().max())
        allowed = _TOLERANCE * largest + self.rounding * size
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


def _theirs(
    fn: Callable[..., Any], tensors: list[Tensor], env: dict[str, Tensor], weight: Tensor
) -> list[Tensor]:
    score = env["score"].detach().requires_grad_()
    with torch.enable_grad():
        values = at_points(fn, score, *(env[name] for name in ("b", "h", "q_idx", "kv_idx")))
        if not values.requires_grad:
            return [torch.zeros_like(x) for x in (score, *tensors)]
        given = torch.where(weight == 0, 0.0, weight).to(values.dtype)
        found = torch.autograd.grad(values, [score, *tensors], given, allow_unused=True)
    pairs = zip((score, *tensors), found, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs]
