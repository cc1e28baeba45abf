"""Every pointwise operation of aten is served as torch computes it, or is left to plain torch.

torch's compiled flex_attention has asinh, hypot and copysign; an eager call of ours refused them.
"""

import random

import pytest
import torch

from flexattn.errors import NoKernelError
from flexattn.mods import bind
from flexattn.mods.outside import evaluated

# What no kernel computes: plain torch does on the CPU, and on a GPU its compiled kernel.
LEFT = {
    "_conj_physical", "digamma", "frexp", "gcd", "i0", "igamma", "igammac", "lcm", "nextafter",
    "polygamma", "angle", "signbit",
    "special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0",
    "special_bessel_y1", "special_erfcx", "special_hermite_polynomial_h",
    "special_hermite_polynomial_he", "special_i0e", "special_i1", "special_i1e",
    "special_laguerre_polynomial_l", "special_legendre_polynomial_p", "special_log_ndtr",
    "special_ndtri", "special_spherical_bessel_j0", "special_zeta",
    *(f"special_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"special_shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"special_modified_bessel_{kind}" for kind in ("i0", "i1", "k0", "k1")),
    *(f"special_scaled_modified_bessel_{kind}" for kind in ("k0", "k1")),
}  # fmt: skip
SCORES = torch.tensor([-2.5, -1.0, -0.5, 0.0, 0.3, 0.5, 0.9, 1.0, 1.7, 3.0])
PLACES = torch.arange(len(SCORES))
# torch shifts a truth, and its own tracer refuses to.
NOT_TRACED = ("__lshift__.Scalar", "__rshift__.Scalar")
# Without `out=` ldexp is composed of others; mvlgamma writes to a part of a tensor that it makes.
WRITTEN = ("ldexp.out", "mvlgamma_.default")


def overloads():
    """All of them, by the dispatcher's list: `dir(torch.ops.aten)` has only what was used before.

    aten.equal has the tag as well, but gives Python's truth; rrelu draws random numbers.
    """
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or not hasattr(torch.ops.aten, name):
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        tensors = all(str(each.type) == "Tensor" for each in op._schema.returns)
        draws = torch.Tag.nondeterministic_seeded in op.tags
        if torch.Tag.pointwise in op.tags and tensors and not draws:
            yield op


OPS = list(overloads())


def arguments(op, tensors):
    """What a call is given, by its schema: these tensors, one after the other, and numbers."""
    tensors, plain, named = iter(tensors * 3), [], {}
    numbers = {"number": 2, "float": 0.5, "int": 2, "bool": True, "str": "trunc"}
    for each in op._schema.arguments:
        kind = str(each.type)
        written = each.alias_info is not None and each.alias_info.is_write and each.kwarg_only
        if each.has_default_value() and each.name not in ("min", "max"):
            continue
        if kind == "Tensor":
            value = torch.empty(0) if written else next(tensors).clone()
        elif kind.startswith("Optional[") and each.name in ("min", "max"):
            value = next(tensors) if "Tensor" in kind else {"min": -1, "max": 1}[each.name]
        else:
            value = numbers.get(kind.removeprefix("Optional[").rstrip("]"))
        if each.kwarg_only:
            named[each.name] = value
        else:
            plain.append(value)
    return plain, named


def applied(op, kind, score, place):
    tensors = {
        "floats": [score, place.float() * 0.5 - 2, score * 0 + 0.7],
        "integers": [place, place * 0 + 3, place - 2],
        "truths": [score > 0, place > 3, score < 0],
    }[kind]
    plain, named = arguments(op, tensors)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and not value.numel():
            like = op._overloadpacket(*plain, **{k: v for k, v in named.items() if k != name})
            named[name] = torch.empty_like(like)
    found = op(*plain, **named)
    return (found[0] if isinstance(found, tuple) else found).to(torch.float32)


def check(op):
    """How often it was compared, and how often left to torch."""
    served, left = 0, 0
    for kind in ("floats", "integers", "truths"):
        try:
            expected = applied(op, kind, SCORES, PLACES)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # torch has none for this dtype
        try:
            bound = bind(lambda s, b, h, q, k, kind=kind: applied(op, kind, s, q), "score")
        except NoKernelError as why:
            known = op.overloadpacket.__name__.rstrip("_") in LEFT
            known = known or str(op)[5:] in WRITTEN
            assert known or (kind == "truths" and str(op)[5:] in NOT_TRACED), why
            assert why.rule and why.do
            left += 1
            continue
        env = {"score": SCORES, "q_idx": PLACES}
        found = evaluated([bound.mod.expr], bound.tensors, env)[bound.mod.expr].value
        torch.testing.assert_close(
            found.expand(len(SCORES)), expected, rtol=1e-5, atol=1e-6, equal_nan=True
        )
        served += 1
    return served, left


@pytest.mark.parametrize("op", random.Random(46).sample(OPS, 12), ids=str)
def test_a_pointwise_operation_is_torchs(op):
    check(op)


@pytest.mark.long
def test_each_pointwise_operation_is_torchs():
    found = [check(op) for op in OPS]
    assert len(OPS) > 500
    assert sum(served for served, _ in found) > 850
    assert sum(left for _, left in found) < 400


NEW = (
    "asinh",
    "acosh",
    "atanh",
    "erfinv",
    "hypot",
    "copysign",
    "fmax",
    "fmin",
)


@pytest.mark.parametrize("name", NEW)
def test_an_operation_that_a_compiled_call_had_is_served(name):
    served, left = check(next(op for op in OPS if op.overloadpacket.__name__ == name))
    assert served and not left
