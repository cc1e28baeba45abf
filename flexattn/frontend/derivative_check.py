"""Whether autograd differentiates a score_mod as its traced expression is differentiated.

A trace says what a mod computes. It does not say what the mod keeps from autograd: by detach, by
torch.no_grad, by an autograd Function with a backward of its own. So the first call with gradients
asks both at some positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexattn.mods import Bound, Identity, bind
from flexattn.mods.derivative import derivatives
from flexattn.mods.expr import Expr
from flexattn.mods.outside import buffer_of, evaluated
from flexattn.mods.simplify import plug
from flexattn.reference import at_points
from flexattn.util.ambient import without_modes
from flexattn.util.lru import Lru

_POINTS = 256
# Beside the largest: a mod's own gradient may be that of what it approximates.
_TOLERANCE = 0.02
_known: Lru[Any, bool] = Lru(256)


def agrees(
    fn: Callable[..., Any] | Bound,
    bound: Bound,
    identity: Identity | None,
    slots: tuple[int, ...],
    sizes: Sequence[int],
) -> bool:
    """Whether both give the same at random positions of sizes (B, Hq, q_len, kv_len).

    identity: the look at the function by which it was bound. slots: of the captured tensors that
    require grad. Asked once for all that the look saw, and each time where it could not see all.
    Raises what `derivatives` and the mod raise.
    """
    if isinstance(fn, Bound):
        return True  # what is bound already has no other gradient
    by_autograd = partial(_theirs, fn, slots)
    if identity is None or not identity.trusted:
        return same_gradients(bound, slots, sizes, by_autograd)
    key = (*identity.key, bound.mod.fingerprint, slots)
    found = _known.get(key)
    if found is None:
        found = same_gradients(bound, slots, sizes, by_autograd)
        _known.put(key, found)
    return found


@without_modes()
def same_gradients(
    bound: Bound,
    slots: tuple[int, ...],
    sizes: Sequence[int],
    others: Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]],
) -> bool:
    """Whether a score_mod's derivatives are others, at random positions of sizes (B, Hq, L, S).

    others(env, weight): the gradients of the sum of weight times the mod's values, [points], with
    respect to the score and to the tensors of the slots. env: the score, b, h, q_idx and kv_idx.
    """
    device = bound.tensors[0].device if bound.tensors else torch.device("cpu")
    draw = torch.Generator().manual_seed(0)
    names = ("b", "h", "q_idx", "kv_idx")
    env = {
        name: torch.randint(max(size, 1), (_POINTS,), generator=draw).to(device)
        for name, size in zip(names, sizes, strict=True)
    }
    env["score"] = (2 * torch.randn(_POINTS, generator=draw, dtype=torch.float32)).to(device)
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
            each.new_zeros(flat.shape).index_add_(0, inverse, each)
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
    fn: Callable[..., Any], slots: tuple[int, ...], env: dict[str, Tensor], weight: Tensor
) -> list[Tensor]:
    # As the mod has them: numbers on the CPU were moved for a kernel.
    own = bind(fn, "score")
    assert own is not None
    tensors = [own.tensors[slot] for slot in slots]
    score = env["score"].detach().requires_grad_()
    with torch.enable_grad():
        values = at_points(fn, score, *(env[name] for name in ("b", "h", "q_idx", "kv_idx")))
        if not values.requires_grad:
            return [torch.zeros_like(x) for x in (score, *tensors)]
        given = torch.where(weight == 0, 0.0, weight).to(values.dtype)
        found = torch.autograd.grad(values, [score, *tensors], given, allow_unused=True)
    pairs = zip((score, *tensors), found, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs]
