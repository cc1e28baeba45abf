"""The table of operations: every row is whole, and its gradients are those of torch's autograd."""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch

from flexattn.errors import UnsupportedError
from flexattn.mods import bind
from flexattn.mods.derivative import derivatives, gradient
from flexattn.mods.expr import Expr
from flexattn.mods.ops import OPS, _float
from flexattn.mods.outside import evaluated

EACH = [
    pytest.param(op, place, id=f"{op.name}-{place}")
    for op in OPS.values()
    for place in range(op.arity)
]
KNOWN = [each for each in EACH if callable(each.values[0].gradients[each.values[1]])]
UNKNOWN = [each for each in EACH if each not in KNOWN]


@pytest.mark.parametrize(("op", "place"), EACH)
def test_an_operand_has_a_gradient_or_a_reason(op, place):
    rule = op.gradients[place]
    if callable(rule):
        assert len(inspect.signature(rule).parameters) == op.arity + 1
    else:
        assert rule.strip()


@pytest.mark.parametrize("name", OPS)
def test_what_a_row_names_exists(name):
    op = OPS[name]
    assert callable(op.function) and op.name == name
    assert all(hasattr(torch.ops.aten, each) for each in op.traced)
    assert {op.on_bool, op.mirrored} <= {"", *OPS}


def test_the_worked_example_is_the_tables_row():
    docs = Path(__file__).parents[3] / "docs" / "adding.md"
    (line,) = re.findall(r"^\+ +(_float\(.*\)),$", docs.read_text(encoding="utf-8"), re.MULTILINE)
    row = eval(line, {"_float": _float})
    assert row == OPS[row.name]


def points():
    """Numbers of every sign and their ends, each beside every other and beside itself."""
    torch.manual_seed(0)
    special = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, math.inf])
    found = torch.cat([torch.randn(12) * 2, special]).double()
    return torch.cartesian_prod(found, found).unbind(1)


def variable(name, dtype="float64"):
    return Expr("var", dtype, (), name)


def operands(op):
    x, y = points()
    inputs = [x, y][: op.arity] if op.arity < 3 else [x > y, x, y]
    return [each.requires_grad_() if each.is_floating_point() else each for each in inputs]


def node_of(op):
    named = [variable(f"x{i}") for i in range(op.arity)]
    if op.name == "where":
        named[0] = variable("x0", "bool")
    # Not by make(): it is this node's own rules that are asked.
    return Expr(op.name, "float64", tuple(named))


@pytest.mark.parametrize(("op", "place"), KNOWN)
def test_gradients_are_those_of_autograd(op, place):
    inputs = operands(op)
    result = op.function(*inputs, **op.kwargs)
    g = torch.linspace(-1, 2, result.numel()).double()
    expected = torch.autograd.grad(result, inputs[place], g)[0]
    found = gradient(node_of(op), place, variable("g"))
    env = {f"x{i}": x.detach() for i, x in enumerate(inputs)} | {"g": g}
    value = evaluated([found], [], env)[found].value.expand_as(expected)
    assert found.dtype == "float64"
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-300, equal_nan=True)


@pytest.mark.parametrize(("op", "place"), UNKNOWN)
def test_an_operand_without_a_gradient_is_refused_with_the_reason(op, place):
    with pytest.raises(UnsupportedError, match=op.gradients[place]):
        gradient(node_of(op), place, variable("g"))


MODS = {
    "clamp": lambda s: torch.clamp(s, -1.0, 1.0),
    "clamp of one end": lambda s: s.clamp(min=0.5) + s.clamp_max(0.5),
    "clamp by a tensor": lambda s: torch.clamp(s, min=torch.zeros_like(s)),
    "relu": lambda s: torch.relu(s) * 3,
    "extremes": lambda s: torch.maximum(s, -s) + torch.minimum(s, s * s),
    "abs": lambda s: s.abs(),
    "where": lambda s: torch.where(s > 0, s, s * s),
    "powers": lambda s: s**2 + s**3 + 2.0**s,
    "softcap": lambda s: 20 * torch.tanh(s / 20),
    "gate": lambda s: torch.nn.functional.silu(s) + torch.nn.functional.gelu(s),
}


@pytest.mark.parametrize("name", MODS)
def test_a_mod_has_torchs_gradient_where_it_bends(name):
    """torch.clamp was traced as maximum and minimum, whose gradient at the ends is a half."""
    scores = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    expected = torch.autograd.grad(MODS[name](scores).sum(), scores)[0]
    bound = bind(lambda score, b, h, q, k: MODS[name](score), "score")
    found = derivatives(bound.mod, ()).score
    value = evaluated([found], [], {"score": scores.detach()})[found].value
    torch.testing.assert_close(value.expand_as(expected), expected)
