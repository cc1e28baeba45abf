"""Derivatives printed for torch, in float64: as an autograd Function, beside autograd's own."""

import math

import torch

from flexattn.kernels.printers.torch_printer import to_torch
from flexattn.mods import look
from flexattn.mods.derivative import derivatives, loaded_floats
from flexattn.mods.outside import read_places
from flexattn.reference.oracle import watched


def printed(expr):
    """An expression as the callable that it is printed as; what is float32 is float64."""
    scope = {"torch": torch, "math": math, "load": lambda x, *index: read_places(x, index)[0]}
    exec(to_torch(expr, wide=True), scope)
    return scope["mod"]


def as_function(fn):
    """A score_mod of points, all of one dimension, whose derivatives are those of its expression.

    It takes (score, b, h, q_idx, kv_idx), then the captured floats in the order of their slots, as
    float64; returns it with those.
    """
    bound = look(fn, "score")[0]
    slots = loaded_floats(bound.mod)
    found = derivatives(bound.mod, slots)

    class Derived(torch.autograd.Function):
        @staticmethod
        def forward(ctx, score, b, h, q_idx, kv_idx, *tables):
            tensors = list(bound.tensors)
            for slot, table in zip(slots, tables, strict=True):
                tensors[slot] = table
            ctx.given = score, b, h, q_idx, kv_idx, tensors, bound.scalars
            return printed(bound.mod.expr)(*ctx.given).expand(score.shape).clone()

        @staticmethod
        def backward(ctx, grad):
            score, *_, tensors, _ = ctx.given
            dscore = torch.zeros_like(score)
            if found.score is not None:
                dscore += grad * printed(found.score)(*ctx.given)
            sums = {slot: torch.zeros_like(tensors[slot]) for slot in slots}
            for each in found.loads:
                part = (grad * printed(each.factor)(*ctx.given)).expand(grad.shape)
                total = sums[int(each.load.value or 0)]
                places = [printed(arg)(*ctx.given).expand(grad.shape) for arg in each.load.args]
                if places:
                    total.index_put_(tuple(places), part, accumulate=True)
                else:
                    total += part.sum()
            return dscore, None, None, None, None, *sums.values()

    wide = [bound.tensors[slot].detach().double().requires_grad_() for slot in slots]
    return Derived.apply, wide


def at_points(score_mod, score, *index):
    """A score_mod at points, all of one dimension, as the oracle maps it; differentiable.

    index: b, h, q_idx, kv_idx. What it reads outside of a tensor is the nearest element.
    """
    value, _ = torch.vmap(watched(score_mod))(score, *index)
    return value


def points(sizes, count, draw):
    """Scores in float64 that want a gradient, and positions below sizes (B, H, L, S)."""
    score = 2 * torch.randn(count, generator=draw, dtype=torch.float64)
    places = [torch.randint(size, (count,), generator=draw) for size in sizes]
    return score.requires_grad_(), places


def assert_printed_derivatives(make, tables, sizes, count, draw):
    """Hold the printed derivatives of make(*tables), of float32, to autograd's of float64."""
    score, places = points(sizes, count, draw)
    function, wide = as_function(make(*tables))
    kept = [x for x in look(make(*tables), "score")[0].tensors if x.is_floating_point()]
    order = [next(i for i, x in enumerate(tables) if x is each) for each in kept]
    leaves = [x.double().requires_grad_() for x in tables]
    weight = torch.randn(count, generator=draw, dtype=torch.float64)
    ours = torch.autograd.grad(function(score, *places, *wide), [score, *wide], weight)
    value = at_points(make(*leaves), score, *places)
    if not value.requires_grad:
        assert not any(x.any() for x in ours)
        return
    learn = [score, *(leaves[i] for i in order)]
    exact = torch.autograd.grad(value, learn, weight, allow_unused=True)
    for one, other in zip(ours, exact, strict=True):
        other = torch.zeros_like(one) if other is None else other
        # What is no number, for a derivative of 0 was multiplied by an infinite one, says nothing.
        finite = one.isfinite() & other.isfinite()
        one, other = (torch.where(finite, x, 0.0) for x in (one, other))
        # Constants of an expression are float32's.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
