"""Derivatives of whole score_mods: torch's, in float64, and as short as the mod itself."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from flexattn.errors import UnsupportedError
from flexattn.mods import bind
from flexattn.mods.derivative import derivatives, loaded_floats
from flexattn.mods.expr import pretty, walk
from flexattn.mods.outside import buffer_of, evaluated
from flexattn.mods.simplify import plug
from tests.derivatives import as_function, at_points, points as points_of
from tests.random_mods.mods import random_mod

SIZES = {"b": 2, "h": 3, "q_idx": 45, "kv_idx": 61}
POINTS = 200
table = torch.linspace(-1, 1, 200)


def points(draw):
    env = {n: torch.randint(size, (POINTS,), generator=draw) for n, size in SIZES.items()}
    env["score"] = 2 * torch.randn(POINTS, generator=draw)
    return env


def evaluate(bound, roots, env):
    """Values of expressions at points, and where they rest on a read outside of a tensor."""
    numbers = dict(enumerate(bound.scalars))
    plugged = [plug(root, numbers) for root in roots]
    tensors = [x.detach() for x in bound.tensors]
    found = evaluated(plugged, tensors, env)
    values = [found[root].value.expand(POINTS).double() for root in plugged]
    unsure = torch.stack([found[root].unsure.expand(POINTS) for root in plugged]).any(0)
    return values, unsure


def check(fn, env, rtol):
    """The derivative in the score, and in all that is loaded, beside autograd's."""
    bound = bind(fn, "score")
    slots = loaded_floats(bound.mod)
    found = derivatives(bound.mod, slots)
    roots = (bound.mod.expr, *found.roots)
    (_, *factors), unsure = evaluate(bound, roots, env)
    weight = torch.where(unsure, 0.0, 1.0).double()
    leaves = [bound.tensors[slot].requires_grad_() for slot in slots]
    score = env["score"].clone().requires_grad_()
    values = at_points(fn, score, *(env[n] for n in SIZES))
    expected = [None] * (1 + len(leaves))
    if values.requires_grad:
        expected = torch.autograd.grad(
            values, [score, *leaves], weight.to(values.dtype), allow_unused=True
        )
    sizes = [torch.zeros(()).double(), *(torch.zeros(x.shape).double() for x in leaves)]
    ours = [torch.zeros(POINTS).double(), *(torch.zeros(x.shape).double() for x in leaves)]
    if found.score is not None:
        ours[0] = torch.where(unsure, 0.0, factors.pop(0))
    for each, factor in zip(found.loads, factors, strict=True):
        shape = buffer_of(each.load, bound.tensors).shape
        places, _ = evaluate(bound, each.load.args, env) if each.load.args else ([], None)
        places = [x.long().clamp(-n, max(n - 1, 0)) for x, n in zip(places, shape, strict=True)]
        place = 1 + slots.index(int(each.load.value or 0))
        part = torch.where(unsure, 0.0, factor)
        for total, added in ((ours[place], part), (sizes[place], part.abs())):
            if places:
                total.index_put_(tuple(places), added, accumulate=True)
            else:
                total += added.sum()
    for x in leaves:
        x.requires_grad_(False)
    for mine, torchs, size in zip(ours, expected, sizes, strict=True):
        # Autograd adds up in the tensor's own dtype.
        rounded = 0.0 if torchs is None else 4 * torch.finfo(torchs.dtype).eps
        torchs = torch.zeros_like(mine) if torchs is None else torchs.double()
        both = mine.isfinite() & torchs.isfinite()
        largest = torch.where(both, torchs, 0.0).abs().max().clamp(min=1e-3)
        error = torch.where(both, mine - torchs, 0.0).abs()
        allowed = rtol * largest + rounded * size
        assert (error <= allowed).all(), (pretty(bound.mod.expr), error.max(), largest)


MODS = {
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + table[h],
    "alibi": lambda s, b, h, q, k: s + table[h] * (k - q),
    "relative": lambda s, b, h, q, k: s + table[q - k + 99],
    "product of loads": lambda s, b, h, q, k: s * table[q] * table[k] / (table[h] + 2),
    "piecewise": lambda s, b, h, q, k: torch.where(s > table[q], s.abs(), s.clamp(-0.5, 0.25)),
    "one table twice": lambda s, b, h, q, k: s * table[q] + table[q + 1] ** 2,
    "half": lambda s, b, h, q, k: (s.half() * table.half()[h]).float() + s,
    "extremes": lambda s, b, h, q, k: torch.maximum(s, table[q]) + torch.minimum(s, table[k]),
    "equal extremes": lambda s, b, h, q, k: (
        s + torch.maximum(table[h], table[b]) * torch.minimum(table[q], table[q % 32])
    ),
    "a number": lambda s, b, h, q, k: torch.sqrt(s * s + table[0] * table[0]),
    "rounded index": lambda s, b, h, q, k: s * table[(s.abs() * 3).int().clamp(max=150)],
}


@pytest.mark.parametrize("name", [n for n in MODS if n != "half"])
def test_derivatives_are_torchs(name):
    check(MODS[name], points(torch.Generator().manual_seed(0)), 1e-4)


@pytest.mark.parametrize("name", [n for n in MODS if n != "half"])
def test_printed_derivatives_pass_gradcheck(name):
    """In the score and in all that is captured, in float64."""
    draw = torch.Generator().manual_seed(3)
    score, places = points_of(SIZES.values(), 9, draw)
    function, tables = as_function(MODS[name])
    assert all(x.dtype == torch.float64 for x in (score, *tables))
    # Each element of a table costs two evaluations: the Jacobian is multiplied by a random vector.
    assert torch.autograd.gradcheck(
        lambda s, *t: function(s, *places, *t), (score, *tables), fast_mode=True
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000))
def test_derivatives_of_random_mods_are_torchs(index):
    mod = random_mod(7, index)
    if mod.score is None:
        return
    score_mod, _ = mod.make(2, 3, 45, 61)
    env = points(torch.Generator().manual_seed(index))
    try:
        check(score_mod, env, 2e-2)
    except UnsupportedError as error:
        assert "score_mod's derivative goes through" in str(error)


SIMPLE = {
    "softcap": "(1.0 - (t0 * t0))",
    "alibi": "1.0",
    "relative": "1.0",
}


@pytest.mark.parametrize("name", SIMPLE)
def test_derivatives_are_simplified(name):
    """Of a soft cap it is one multiply-add of what the forward had, of a bias it is 1."""
    bound = bind(MODS[name], "score")
    found = derivatives(bound.mod, ()).score
    assert pretty(found).splitlines()[-1] == SIMPLE[name]
    own = set(walk(bound.mod.expr))
    fresh = [node for node in walk(found) if node not in own and node.op != "const"]
    assert len(fresh) <= 2


def test_a_derivative_is_0_where_another_side_was_chosen():
    """The other side's derivative may be no number there, and 0 times it would be none."""
    bound = bind(lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s), "score")
    found = derivatives(bound.mod, ()).score
    scores = torch.tensor([-1.0, 0.0, 2.0])
    value = evaluated([found], [], {"score": scores})[found].value
    assert torch.equal(value, torch.tensor([1.0, 1.0, 0.5]))


def test_nothing_is_rounded_to_sixteen_bits_on_the_way_back():
    bound = bind(MODS["half"], "score")
    for factor in derivatives(bound.mod, loaded_floats(bound.mod)).roots:
        own = set(walk(bound.mod.expr))
        made = [node for node in walk(factor) if node not in own]
        assert all(node.dtype in ("float32", "bool") for node in made)


def test_what_is_not_reached_has_none():
    bound = bind(lambda s, b, h, q, k: s + table[(s * 2).int().clamp(0, 9)], "score")
    found = derivatives(bound.mod, ())
    assert found.score.value == 1.0 and found.loads == ()
    alone = bind(lambda s, b, h, q, k: table[h] + 0.0 * k, "score")
    assert derivatives(alone.mod, loaded_floats(alone.mod)).score is None


def test_what_has_no_derivative_is_named():
    bound = bind(lambda s, b, h, q, k: s + torch.special.gammaln(table[h] + 3), "score")
    assert derivatives(bound.mod, ()).score.value == 1.0
    with pytest.raises(UnsupportedError, match=r"lgamma.*digamma"):
        derivatives(bound.mod, loaded_floats(bound.mod))
