"""What a score_mod keeps from autograd is read from its trace; forwards know nothing of it."""

import pytest
import torch

from flexattn.mods import bind, look
from flexattn.mods.derivative import DETACH, OWN_GRADIENT, derivatives, has_own_gradient
from flexattn.mods.expr import const, pretty, walk

TABLE = torch.linspace(0.5, 1.5, 30, requires_grad=True)


def in_no_grad(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        known = score * 3
        with torch.enable_grad():
            learned = score * 4
    return known + learned


def in_inference_mode(score, b, h, q_idx, kv_idx):
    with torch.inference_mode():
        known = score * 3
    return known + score * 4


@torch.no_grad()
def through_a_decorator(score, b, h, q_idx, kv_idx):
    return score * 3


# Each with the same mod without stops, and how often the first has one.
STOPS = {
    "detach": (lambda s, b, h, i, j: s.detach() * 2 + s, lambda s, b, h, i, j: s * 2 + s, 1),
    "data": (lambda s, b, h, i, j: s.data * TABLE.data[h], lambda s, b, h, i, j: s * TABLE[h], 2),
    "no_grad": (in_no_grad, lambda s, b, h, i, j: s * 3 + s * 4, 1),
    "inference_mode": (in_inference_mode, lambda s, b, h, i, j: s * 3 + s * 4, 1),
    "a decorator": (through_a_decorator, lambda s, b, h, i, j: s * 3, 1),
    "a detached value that is chosen": (
        lambda s, b, h, i, j: torch.where(j == 0, s.detach(), s), lambda s, b, h, i, j: s * 1, 1,
    ),
    "one of many": (
        lambda s, b, h, i, j: (s.detach() * 2 + 1).detach().exp(),
        lambda s, b, h, i, j: (s * 2 + 1).exp(), 1,
    ),
    "what has no gradient": (
        lambda s, b, h, i, j: s + (i - j).detach() * TABLE.detach().long()[j.detach()] * 0.5,
        lambda s, b, h, i, j: s + (i - j) * TABLE.long()[j] * 0.5, 0,
    ),
}  # fmt: skip


def stops(mod):
    return [node.op for node in walk(mod.expr) if node.op in (DETACH, OWN_GRADIENT)]


@pytest.mark.parametrize("name", STOPS)
def test_a_forward_has_no_stops_and_a_backward_those_that_count(name):
    mod, plain, count = STOPS[name]
    kept = look(mod, "score")[0].mod
    assert stops(kept) == [DETACH] * count, pretty(kept.expr)
    assert bind(mod, "score").mod is bind(plain, "score").mod
    assert not has_own_gradient(kept)


@pytest.mark.parametrize("name", STOPS)
def test_gradients_are_those_of_autograd(name):
    mod, (score, place) = STOPS[name][0], (torch.tensor(0.7, requires_grad=True), torch.tensor(3))
    bound = look(mod, "score")[0]
    slots = tuple(range(len(bound.tensors)))
    found = derivatives(bound.mod, slots)
    value = mod(score, *[place] * 4)
    wanted = [None, None]
    if value.requires_grad:
        wanted = torch.autograd.grad(value, [score, TABLE], allow_unused=True)
    assert (found.score is None) == (wanted[0] is None or not wanted[0])
    assert bool(found.loads) == (wanted[1] is not None and bool(wanted[1].any()))
    if found.score is not None and found.score.op == "const":
        assert found.score is const(float(wanted[0]), "float32")


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


apply = Reversed.apply


def hooked(score, b, h, q_idx, kv_idx):
    weight = TABLE * 2
    weight.register_hook(lambda grad: grad * 0.5)
    return score * weight[h]


@pytest.mark.parametrize(
    "mod", [lambda s, b, h, i, j: Reversed.apply(s) * 2, lambda s, b, h, i, j: apply(s), hooked]
)
def test_a_function_or_a_hook_has_a_gradient_of_its_own(mod):
    """A Function that gives back its argument does no operation of its own."""
    assert has_own_gradient(look(mod, "score")[0].mod)
    assert not stops(bind(mod, "score").mod)


class Caller(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        Caller.found = look(lambda s, b, h, i, j: s.detach() * x.shape[0] + s, "score")[0]
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_call_inside_of_a_function_is_none_of_the_mods():
    """As by a reentrant checkpoint, whose forward is one."""
    Caller.apply(torch.ones(3, requires_grad=True))
    assert stops(Caller.found.mod) == [DETACH]


def test_a_mask_has_none():
    def mask(b, h, i, j):
        return (i.float().detach() >= TABLE.detach()[j]) & (i >= j)

    assert not stops(look(mask, "mask")[0].mod)


def test_a_mod_that_asks_for_grad_mode_is_traced_in_it():
    def mod(s, b, h, i, j):
        return s.detach() * 2 if torch.is_grad_enabled() else s * 3

    with torch.no_grad():
        off = look(mod, "score")[0].mod
    on = look(mod, "score")[0].mod
    assert not stops(off) and stops(on) == [DETACH]
    assert pretty(off.expr) == "(score * 3.0)" and bind(mod, "score").mod is not off
