"""Expr, its canonical form and its bounds."""

import functools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from flexattn.kernels.printers.torch_printer import evaluate
from flexattn.mods import bind
from flexattn.mods.analysis.intervals import Intervals
from flexattn.mods.expr import VARS, Expr, Mod, const, fingerprint, walk
from flexattn.mods.ops import OPS, is_float
from flexattn.mods.simplify import make, rebuilt

INTS = ("add", "sub", "mul", "minimum", "maximum", "and", "or", "xor", "floor_div", "floor_mod")
FLOATS = ("add", "sub", "mul", "div", "minimum", "maximum")
COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("and", "or", "xor")
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 3e38])
INTEGERS = st.integers(-3, 5)


def simplify(expr):
    """The canonical form of a whole expression."""
    return rebuilt(expr, lambda node, args: None)


def var(name):
    return Expr("var", VARS[name], (), name)


@functools.cache
def exprs(depth, dtype):
    leaves = {
        "int64": st.sampled_from([var(n) for n in ("b", "h", "q_idx", "kv_idx")])
        | INTEGERS.map(lambda v: const(v, "int64")),
        "float32": st.just(var("score")) | SCORES.map(lambda v: const(_f32(v), "float32")),
        "bool": st.booleans().map(lambda v: const(v, "bool")),
    }
    if depth == 0:
        return leaves[dtype]
    same = exprs(depth - 1, dtype)
    any_dtype = st.sampled_from(["int64", "float32", "bool"])
    cast = any_dtype.flatmap(lambda t: exprs(depth - 1, t)).filter(
        lambda e: not (is_float(e.dtype) and dtype == "int64")
    )
    choices = [
        leaves[dtype],
        cast.map(lambda e: Expr("cast", dtype, (e,))),
        st.tuples(exprs(depth - 1, "bool"), same, same).map(lambda a: Expr("where", dtype, a)),
    ]
    names = {"int64": INTS, "float32": FLOATS, "bool": LOGIC}[dtype]
    choices.append(
        st.tuples(st.sampled_from(names), same, same).map(lambda a: Expr(a[0], dtype, a[1:]))
    )
    if dtype == "bool":
        choices.append(same.map(lambda e: Expr("not", "bool", (e,))))
        operands = st.sampled_from(["int64", "float32"]).flatmap(
            lambda t: st.tuples(exprs(depth - 1, t), exprs(depth - 1, t))
        )
        choices.append(
            st.tuples(st.sampled_from(COMPARES), operands).map(lambda a: Expr(a[0], "bool", a[1]))
        )
    return st.one_of(choices)


def _f32(v):
    return torch.tensor(v, dtype=torch.float32).item()


def run(expr, env):
    mod = Mod("score", expr, (), (), fingerprint("score", expr, (), ()))
    return evaluate(mod, env, (), ())


def positions(values):
    score, *rest = values
    env = {"score": torch.tensor(score, dtype=torch.float32)}
    names = ("b", "h", "q_idx", "kv_idx")
    return env | dict(zip(names, map(torch.tensor, rest), strict=True))


POINTS = st.tuples(SCORES, *[st.integers(0, 9)] * 4)
ANY = st.sampled_from(["int64", "float32", "bool"]).flatmap(lambda t: exprs(3, t))


@settings(max_examples=100, deadline=None)
@given(ANY, POINTS)
def test_simplify_keeps_every_value_and_is_stable(expr, point):
    simple = simplify(expr)
    assert simplify(simple) is simple and simple.dtype == expr.dtype
    env = positions(point)
    try:
        before = run(expr, env)
    except RuntimeError:  # an integer division by zero, which torch refuses
        return
    torch.testing.assert_close(run(simple, env), before, rtol=0, atol=0, equal_nan=True)


def commuted(expr):
    done = {}
    for node in walk(expr):
        args = tuple(done[a] for a in node.args)
        if node.op in OPS and OPS[node.op].commutes:
            args = args[::-1]
        swapped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(node.op)
        done[node] = Expr(
            swapped or node.op, node.dtype, args[::-1] if swapped else args, node.value
        )
    return done[expr]


@settings(max_examples=80, deadline=None)
@given(ANY)
def test_commuted_spellings_are_one(expr):
    assert simplify(commuted(expr)) is simplify(expr)


@settings(max_examples=100, deadline=None)
@given(exprs(3, "int64"), POINTS)
def test_bounds_are_sound(expr, point):
    found = Intervals(dict.fromkeys(("b", "h", "q_idx", "kv_idx"), (0, 9)))(expr)
    try:
        result = run(expr, positions(point)).item()
    except RuntimeError:
        return
    assert found[0] <= result <= found[1]


def test_bounds_decide_what_kernels_ask():
    q, k = var("q_idx"), var("kv_idx")
    ranges = {"q_idx": (0, 1023), "kv_idx": (0, 511)}
    assert Intervals(ranges)(make("sub", "int64", (q, k))) == (-511, 1023)
    assert Intervals(ranges)(make("floor_mod", "int64", (q, const(64, "int64")))) == (0, 63)
    assert Intervals(ranges)(Expr("scalar", "int64", (), 0)) == (-(2**63), 2**63 - 1)
    assert Intervals(ranges)(Expr("load", "int32", (q,), 0)) == (-(2**31), 2**31 - 1)
    assert Intervals(ranges)(make("mul", "int64", (q, const(2**62, "int64"))))[0] == -(2**63)
    assert Intervals(ranges)(var("score")) is None


def same(f, g, kind="mask"):
    return bind(f, kind).mod.fingerprint == bind(g, kind).mod.fingerprint


def test_spellings_that_mean_the_same():
    x, y = torch.ones(3), torch.ones(3)
    assert same(lambda b, h, q, k: q >= k, lambda b, h, q, k: k <= q)
    assert same(lambda b, h, q, k: ~(q < k), lambda b, h, q, k: ~~(q >= k))
    assert same(
        lambda b, h, q, k: (q >= k) & (b > 1) & (q >= k), lambda b, h, q, k: (b > 1) & (k <= q)
    )
    assert same(
        lambda s, b, h, q, k: x[h] + y[h] + s, lambda s, b, h, q, k: s + (y[h] + x[h]), "score"
    )
    assert same(
        lambda s, b, h, q, k: s, lambda s, b, h, q, k: torch.where(q >= q, s * 1, -s), "score"
    )


def test_what_differs_keeps_its_own_fingerprint():
    x, y = torch.ones(3), torch.ones(3)
    assert not same(lambda s, b, h, q, k: s + 0.0, lambda s, b, h, q, k: s - 0.0, "score")
    assert not same(lambda s, b, h, q, k: s + (s + 1), lambda s, b, h, q, k: s + s + 1, "score")
    assert not same(lambda s, b, h, q, k: ~(s < 1), lambda s, b, h, q, k: s >= 1, "score")
    assert not same(
        lambda s, b, h, q, k: s + x[h], lambda s, b, h, q, k: s + y.double()[h], "score"
    )
    assert not same(lambda s, b, h, q, k: x[h] + x[q], lambda s, b, h, q, k: x[h] + y[q], "score")
    a, b = (fingerprint("score", const(v, "float32"), (), ()) for v in (0.0, -0.0))
    assert a != b


def test_equal_nodes_are_one_object_and_pickle_so():
    a = make("add", "int64", (var("q_idx"), const(1, "int64")))
    assert a is make("add", "int64", (const(1, "int64"), var("q_idx")))
    assert pickle.loads(pickle.dumps(a)) is a
    assert const(1, "int64") is not const(True, "int64")
    assert const(math.nan, "float32") is const(math.nan, "float32")
    with pytest.raises(AttributeError):
        a.op = "sub"
